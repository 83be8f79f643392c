"""Moves a pool to its requested size: fast up, slowly down, without oscillation. Does no I/O.

- A pool grows at once to its requested size.
- A pool shrinks some time after its last change, by the fraction `step_down` of its size at a time.
  It never shrinks below the largest size to keep (`keep`) of the last `down_window_s` seconds. The
  size to keep is the requested size plus a margin, so a pool whose load is between two sizes does
  not oscillate: it keeps the larger size.
- A change of direction waits until the last change of direction was `reversal_s` ago. There are two
  exceptions: a pool grows at once after a step of the load, and if it is empty.
- A pool that has had no request for a while gets its smallest size, and its history is dropped.
"""

from collections import deque
from typing import NamedTuple

from tandem.common.config.autoscale import AutoscaleConfig


class SizeStep(NamedTuple):
    size: int
    held: str  # reason why `size` is not the requested size; empty if the two are equal


class Stabilizer:
    """Stabilizes the size of one pool. Callers must pass `now_s` values that never decrease."""

    def __init__(self, config: AutoscaleConfig, now_s: float) -> None:
        self._config = config
        self._kept: deque[tuple[float, int]] = deque()
        self._direction = 0  # direction of the last change: 1 up, -1 down
        self._changed_s = now_s  # starts now, so that the pool cannot shrink at once
        self._reversed_s = -float("inf")

    def rest(self, now_s: float) -> None:
        """Drops the history, because the pool is not used."""
        self._kept.clear()
        self._direction = 0
        self._changed_s = now_s

    def step(
        self, now_s: float, size: int, wanted: int, keep: int, *, is_urgent: bool = False
    ) -> SizeStep:
        """Returns the next size of a pool of `size` workers that needs `wanted` workers.

        The pool never shrinks below the largest `keep` and `wanted` of the last `down_window_s`
        seconds. With `is_urgent` the pool grows even just after a change of direction.
        """
        config = self._config
        most = self._most_kept(now_s, max(wanted, keep))
        if wanted > size:
            if self._may_turn(1, now_s) or size == 0 or is_urgent:
                self._turn(1, now_s)
                return SizeStep(wanted, "")
            wait_s = self._reversed_s + config.reversal_s - now_s
            return SizeStep(
                size, f"turned {config.reversal_s - wait_s:.0f} s ago, {wait_s:.0f} s more"
            )
        if most >= size:
            span = f"in the last {config.down_window_s:.0f} s"
            return SizeStep(size, "" if wanted == size else f"{most} was to be kept {span}")
        rest_s = config.down_window_s if self._direction >= 0 else config.down_interval_s
        wait_s = self._changed_s + rest_s - now_s
        if wait_s > 0 or not self._may_turn(-1, now_s):
            return SizeStep(size, f"the last change was {now_s - self._changed_s:.0f} s ago")
        self._turn(-1, now_s)
        return SizeStep(max(most, size - max(1, int(size * config.step_down))), "")

    def _most_kept(self, now_s: float, keep: int) -> int:
        self._kept.append((now_s, keep))
        while self._kept[0][0] < now_s - self._config.down_window_s:
            self._kept.popleft()
        return max(kept for _, kept in self._kept)

    def _may_turn(self, direction: int, now_s: float) -> bool:
        turns = self._direction == -direction
        return not turns or now_s - self._reversed_s >= self._config.reversal_s

    def _turn(self, direction: int, now_s: float) -> None:
        if self._direction == -direction:
            self._reversed_s = now_s
        self._direction = direction
        self._changed_s = now_s

"""Moves a pool to its requested size: fast up, slowly down, without oscillation. Pure.

    up    at once, to the requested size
    down  to the largest size to keep in the last `down_window_s`, `step_down` at a time, some time
          after the last change; the size to keep is the requested size plus a margin, so that a
          load between two sizes gets the larger one
    a change of direction waits until the last one was `reversal_s` ago
Regardless of earlier changes, a pool grows at once after a step of the load, or if the pool is
empty and a request waits for it. A pool without any request gets its smallest size, and its history
is dropped.
"""

from collections import deque
from typing import NamedTuple

from tandem.common.config.autoscale import AutoscaleConfig


class Step(NamedTuple):
    size: int
    held: str  # reason why it is not the requested size; empty if it is


class Stabilizer:
    """Stabilizes the size of one pool. `now_s` never decreases."""

    def __init__(self, config: AutoscaleConfig, now_s: float) -> None:
        self._config = config
        self._kept: deque[tuple[float, int]] = deque()
        self._direction = 0  # direction of the last change: 1 up, -1 down
        self._changed_s = now_s  # earlier loads are unknown, so no size falls at once
        self._reversed_s = -float("inf")

    def rest(self, now_s: float) -> None:
        """Drops the history, because the pool is not used."""
        self._kept.clear()
        self._direction = 0
        self._changed_s = now_s

    def step(
        self, now_s: float, size: int, wanted: int, keep: int, *, is_urgent: bool = False
    ) -> Step:
        """Returns the next size of a pool of `size` workers that needs `wanted` workers.

        It never shrinks below the largest `keep` and `wanted` of the last `down_window_s`. With
        `is_urgent` it grows even just after a change of direction.
        """
        config = self._config
        most = self._most_kept(now_s, max(wanted, keep))
        if wanted > size:
            if self._may_turn(1, now_s) or size == 0 or is_urgent:
                self._turn(1, now_s)
                return Step(wanted, "")
            wait_s = self._reversed_s + config.reversal_s - now_s
            return Step(size, f"turned {config.reversal_s - wait_s:.0f} s ago, {wait_s:.0f} s more")
        if most >= size:
            span = f"in the last {config.down_window_s:.0f} s"
            return Step(size, "" if wanted == size else f"{most} was to be kept {span}")
        rest_s = config.down_window_s if self._direction >= 0 else config.down_interval_s
        wait_s = self._changed_s + rest_s - now_s
        if wait_s > 0 or not self._may_turn(-1, now_s):
            return Step(size, f"the last change was {now_s - self._changed_s:.0f} s ago")
        self._turn(-1, now_s)
        return Step(max(most, size - max(1, int(size * config.step_down))), "")

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

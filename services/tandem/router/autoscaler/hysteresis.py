"""Moves a pool to its requested size: fast up, slowly down, without oscillation. Does no I/O.

- A pool grows at once to its requested size.
- A pool shrinks only some time after its last change, and at most by the fraction `step_down` of
  its size at a time. Example: with 0.25, 8 workers become 6, then 5.
- A pool shrinks only to a size that leaves some of its capacity unused. With a `down_margin` of
  0.8, a pool of 5 workers shrinks to 4 only when 4 * 0.8 = 3.2 workers have been enough for
  `down_window_s` seconds. So a pool whose load varies a little does not oscillate.
- A change of direction, such as shrinking after growing, needs at least `reversal_s` seconds since
  the previous change of direction. There are two exceptions: a pool grows at once after a step (a
  sudden increase) of the load, and if it is empty.
- A pool that has had no request for a while gets its smallest size, and its history is dropped.
"""

from collections import deque
from typing import NamedTuple

from tandem.common.config.autoscale import AutoscaleConfig


class SizeStep(NamedTuple):
    size: int
    held: str  # why `size` differs from the requested size, for operators; "" if they are equal


class Stabilizer:
    """Stabilizes the size of one pool. Callers must pass `now_s` values that never decrease."""

    def __init__(self, config: AutoscaleConfig, now_s: float) -> None:
        self._config = config
        self._kept: deque[tuple[float, int]] = deque()
        self._direction = 0  # direction of the last change: 1 up, -1 down
        # Time of the last change of the size. The initial value `now_s` delays the first shrinking.
        self._changed_s = now_s
        self._reversed_s = -float("inf")

    def rest(self, now_s: float) -> None:
        """Drops the history of a pool that is not used."""
        self._kept.clear()
        self._direction = 0
        self._changed_s = now_s

    def step(
        self, now_s: float, size: int, wanted: int, keep: int, *, is_urgent: bool = False
    ) -> SizeStep:
        """Returns the next size of a pool that has `size` workers and needs `wanted` workers.

        `keep` is the smallest size to which the pool may shrink. The pool does not shrink below any
        `keep` or `wanted` of the last `down_window_s` seconds. `is_urgent` allows the pool to grow
        even if it has just shrunk.
        """
        config = self._config
        most = self._most_kept(now_s, max(wanted, keep))
        if wanted > size:
            if self._may_turn(1, now_s) or size == 0 or is_urgent:
                self._turn(1, now_s)
                return SizeStep(wanted, "")
            wait_s = self._reversed_s + config.reversal_s - now_s
            return SizeStep(
                size,
                f"the pool changed its direction {config.reversal_s - wait_s:.0f} s ago, and may "
                f"change it again in {wait_s:.0f} s",
            )
        if most >= size:
            span = f"in the last {config.down_window_s:.0f} s"
            return SizeStep(size, "" if wanted == size else f"{most} workers were needed {span}")
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

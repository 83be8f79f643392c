"""Moves a pool to its wanted size: fast up, slow down, never back and forth. Pure.

    up    at once, to what is wanted
    down  to the most that was to be kept in the last `down_window_s`, `step_down` at a time, a
          while after the last change; kept is what is wanted and a margin, so that a load about
          the edge of two sizes has the larger one
    a change of direction waits until the last one is `reversal_s` ago: one in that time at most

Whatever was before, a pool grows at once if the load made a step, or if the pool is empty and
somebody waits for it. A pool without any request rests at its smallest size, and what was before
does not count any more.
"""

from collections import deque
from typing import NamedTuple

from tandem.common.config.autoscale import AutoscaleConfig


class SizeStep(NamedTuple):
    size: int
    held: str  # why it is not what was wanted; empty when it is


class Stabilizer:
    """Stabilizes the size of one pool. `now_s` never goes back."""

    def __init__(self, config: AutoscaleConfig, now_s: float) -> None:
        self._config = config
        self._kept: deque[tuple[float, int]] = deque()
        self._direction = 0  # of the last change: 1 up, -1 down
        self._changed_s = now_s  # what was before is not known: no size falls at once
        self._reversed_s = -float("inf")

    def rest(self, now_s: float) -> None:
        """Forgets what was before, because nobody uses the pool."""
        self._kept.clear()
        self._direction = 0
        self._changed_s = now_s

    def step(
        self, now_s: float, size: int, wanted: int, keep: int, *, is_urgent: bool = False
    ) -> SizeStep:
        """Returns the next size of a pool of `size` that needs `wanted` workers. It never shrinks
        below the largest `keep` and `wanted` of the last `down_window_s`. If `is_urgent`, it grows
        though it has just turned."""
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

"""Keeps latencies of the last minute, for the operators' page. No I/O, no clock.

Medians and percentiles are measured values, not interpolated in the buckets of a histogram. The
owner calls `next_step` every few seconds; the values of the last STEPS_KEPT steps are kept. A
step keeps at most VALUES_MAX values. If there are more, a random choice of them is kept, so the
median and the percentile are estimates then; the largest value is always exact.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field

STEPS_KEPT = 12  # a minute of steps of 5 seconds
VALUES_MAX = 1024
P95_MIN = 20  # the 95th percentile is reported only if there are at least this many values


@dataclass(frozen=True, slots=True)
class Latency:
    """A summary of latencies. A value is None if there are too few latencies to know it."""

    number: int = 0
    median_ms: float | None = None
    p95_ms: float | None = None
    max_ms: float | None = None
    num_late: int = 0  # number of latencies above their target


@dataclass(slots=True)
class _Step:
    number: int = 0
    num_late: int = 0
    max_s: float = 0.0
    values_s: list[float] = field(default_factory=list)

    def add(self, seconds: float, is_late: bool) -> None:
        self.number += 1
        self.num_late += is_late
        self.max_s = max(self.max_s, seconds)
        if len(self.values_s) < VALUES_MAX:
            self.values_s.append(seconds)
        elif (place := random.randrange(self.number)) < VALUES_MAX:
            self.values_s[place] = seconds


class Latencies:
    """The latencies of one kind, such as times to the first token."""

    def __init__(self) -> None:
        self._steps = deque([_Step()], maxlen=STEPS_KEPT)

    def add(self, seconds: float, *, is_late: bool = False) -> None:
        self._steps[-1].add(seconds, is_late)

    def next_step(self) -> Latency:
        """Begins a new step; returns the summary of the step before."""
        ended = _summary([self._steps[-1]])
        self._steps.append(_Step())
        return ended

    def open_step(self) -> Latency:
        """Returns the summary of the step that has not ended yet."""
        return _summary([self._steps[-1]])

    def last_minute(self) -> Latency:
        return _summary(list(self._steps))


def _summary(steps: list[_Step]) -> Latency:
    values_s = sorted(value for step in steps for value in step.values_s)
    if not values_s:
        return Latency()
    number = sum(step.number for step in steps)
    return Latency(
        number,
        _nearest_ms(values_s, 0.5),
        _nearest_ms(values_s, 0.95) if number >= P95_MIN else None,
        _ms(max(step.max_s for step in steps)),
        sum(step.num_late for step in steps),
    )


def _nearest_ms(values_s: list[float], share: float) -> float:
    """Returns the `share` quantile of sorted values, without interpolation, in ms."""
    return _ms(values_s[math.ceil(share * len(values_s)) - 1])


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)

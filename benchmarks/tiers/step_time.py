"""Measures the time of an engine's thread that goes to its tiers.

Each public method and property of the objects that an engine has for its tiers alone is timed:
`Tiers`, its look-ups, the plans of loads, and the chains that are kept. A call within another one
counts once. Not timed is what a pool does anyway, such as the order of its evictions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from tandem.engine.engine import Engine

_SELDOM = ("check_integrity", "close", "reset", "reset_prefix_cache")


class TierTime:
    """The time since the last `take`, on the clocks of the thread and of the wall.

    The wall's clock also has what others do meanwhile: the tiers' own threads, which want the
    interpreter's lock, and other processes.
    """

    def __init__(self, engine: Engine) -> None:
        self._cpu_s = self._wall_s = 0.0
        self._is_inside = False
        self._cpu_ms: list[float] = []
        self._wall_ms: list[float] = []
        for place in (engine._tiers, engine._tiers.lookups, engine._scheduler.loads, engine.kept):
            self._watch(place)

    def end_step(self) -> None:
        """Counts what came since the last step as the time of one."""
        self._cpu_ms.append(1e3 * self._cpu_s)
        self._wall_ms.append(1e3 * self._wall_s)
        self.forget()

    def forget(self) -> None:
        """Drops what came since the last step: the engine only asked whether there is work."""
        self._cpu_s = self._wall_s = 0.0

    def take(self) -> tuple[list[float], list[float]]:
        """Returns the times of all steps in ms: of the thread's CPU, and of the wall."""
        taken = self._cpu_ms, self._wall_ms
        self._cpu_ms, self._wall_ms = [], []
        return taken

    def _watch(self, place: Any) -> None:
        own: dict[str, Any] = {}
        for name, member in vars(type(place)).items():
            if name.startswith("_") or name in _SELDOM:
                continue
            if isinstance(member, property):
                assert member.fget is not None
                own[name] = property(self._timed(member.fget))
            elif callable(member):
                own[name] = self._timed(member)
        place.__class__ = type(type(place).__name__, (type(place),), own)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return call(*args, **kwargs)
            self._is_inside = True
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self._cpu_s += time.thread_time() - cpu
                self._wall_s += time.perf_counter() - wall
                self._is_inside = False

        return timed


def percentiles(cpu_ms: list[float], wall_ms: list[float]) -> dict[str, float]:
    """Returns the columns of a table that tell the time of the tiers in a step."""
    row = {}
    for clock, times in (("cpu", cpu_ms), ("wall", wall_ms)):
        cuts = statistics.quantiles(times, n=100)
        row |= {f"tier_{clock}_p50_ms": cuts[49], f"tier_{clock}_p99_ms": cuts[98]}
        row[f"tier_{clock}_mean_ms"] = statistics.mean(times)
    return row

"""Methods compared in turn, A B A B, so that what else the machine does falls on all of them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

Method = Callable[[], Awaitable[float]]  # makes one transfer; the seconds it took

_CPUCLOCK_SCHED = 2
_SMALL_BLOCKS = 64  # below it a transfer is so short that more samples are taken


def num_samples(repeats: int, num_blocks: int) -> int:
    """`repeats`, and up to 16 times as many for transfers that are over in no time."""
    return repeats * max(1, min(16, _SMALL_BLOCKS // num_blocks))


async def in_turn(
    methods: Mapping[str, Method], *, samples: int, num_bytes: int, pids: Iterable[int]
) -> dict[str, dict[str, float]]:
    """Method name -> figures. One transfer of each goes before and is not counted.

    `pids`: processes that take part; their CPU time counts for the method that runs.
    """
    pids = list(pids)
    for method in methods.values():
        await method()
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    cpu_s = dict.fromkeys(methods, 0.0)
    gc.collect()
    for _ in range(samples):
        for name, method in methods.items():
            before = cpu_seconds(pids)
            seconds[name].append(await method())
            cpu_s[name] += cpu_seconds(pids) - before
    return {
        name: _figures(taken, cpu_s[name] / samples, num_bytes) for name, taken in seconds.items()
    }


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time of the processes, ended threads counted in, to the nanosecond."""
    return sum(time.clock_gettime(_cpu_clock(pid)) for pid in pids)


def _cpu_clock(pid: int) -> int:
    """Returns the answer of clock_getcpuclockid(3) on Linux. Python has it for threads only."""
    return (~pid << 3) | _CPUCLOCK_SCHED


def _figures(seconds: list[float], cpu_s: float, num_bytes: int) -> dict[str, float]:
    median = statistics.median(seconds)
    figures: dict[str, Any] = {
        "median_s": median,
        "min_s": min(seconds),
        "max_s": max(seconds),
        "gb_per_s": num_bytes / median / 1e9,
        "cpu_s_per_gb": cpu_s / (num_bytes / 1e9),
    }
    return {name: float(f"{value:.4g}") for name, value in figures.items()}

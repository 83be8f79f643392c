"""Memory, descriptors and threads of a cluster's processes over time, and whether they grow."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tandem.cluster.processes.guardian import cluster_processes

HOUR_S = 3600.0
SETTLE = 1 / 3  # of a series, left out of its slope
SAMPLES_MIN = 6
MIB = 1 << 20
# Growth in an hour that is none: of memory a share and a bit, of what is counted a few.
FLAT_SHARE = 0.05
FLAT_MIB = 1.0
FLAT_COUNT = 3.0


@dataclass
class Series:
    """One quantity of one thing; `at_s` are seconds after the start."""

    at_s: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, at_s: float, value: float) -> None:
        self.at_s.append(at_s)
        self.values.append(value)

    def settled(self) -> tuple[list[float], list[float]]:
        """Without the first third of the time."""
        if not self.at_s:
            return [], []
        begin_s = self.at_s[0] + SETTLE * (self.at_s[-1] - self.at_s[0])
        kept = [i for i, at_s in enumerate(self.at_s) if at_s >= begin_s]
        return [self.at_s[i] for i in kept], [self.values[i] for i in kept]

    def summary(self, *, flat_share: float, flat: float) -> dict[str, Any]:
        """The slope an hour, its standard error, and whether it is growth."""
        at_s, values = self.settled()
        slope, error = slope_per_hour(at_s, values)
        mean = sum(values) / len(values) if values else 0.0
        allowed = flat_share * mean + flat
        return {
            "first": self.values[0] if self.values else 0.0,
            "last": self.values[-1] if self.values else 0.0,
            "max": max(self.values, default=0.0),
            "per_hour": slope,
            "error": error,
            "grows": len(values) >= SAMPLES_MIN and slope - 2 * error > allowed,
        }


def slope_per_hour(at_s: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Least squares, and its standard error.

    Samples that follow each other are alike, so they count for less than their number: by the
    autocorrelation of what the line leaves over, at a lag of one.
    """
    n = len(values)
    if n < 3:
        return 0.0, math.inf
    mean_t, mean_v = sum(at_s) / n, sum(values) / n
    spread = sum((t - mean_t) ** 2 for t in at_s)
    if not spread:
        return 0.0, math.inf
    slope = sum((t - mean_t) * (v - mean_v) for t, v in zip(at_s, values, strict=True)) / spread
    rest = [v - mean_v - slope * (t - mean_t) for t, v in zip(at_s, values, strict=True)]
    square = sum(r * r for r in rest)
    alike = 0.0
    if square:
        alike = sum(a * b for a, b in itertools.pairwise(rest)) / square
    alike = min(0.95, max(0.0, alike))
    degrees = max(1.0, n * (1 - alike) / (1 + alike) - 2)
    error = math.sqrt(square / degrees / spread)
    return slope * HOUR_S, error * HOUR_S


@dataclass
class ProcessSeries:
    pid: int
    began_s: float
    rss_mib: Series = field(default_factory=Series)
    pss_mib: Series = field(default_factory=Series)
    own_mib: Series = field(default_factory=Series)
    descriptors: Series = field(default_factory=Series)
    threads: Series = field(default_factory=Series)
    is_gone: bool = False

    def summary(self) -> dict[str, Any]:
        return {
            "pid": self.pid,
            "seen_s": [round(s, 1) for s in (self.began_s, self.pss_mib.at_s[-1])],
            "ended": self.is_gone,
            "rss_mib": self.rss_mib.summary(flat_share=FLAT_SHARE, flat=FLAT_MIB),
            "pss_mib": self.pss_mib.summary(flat_share=FLAT_SHARE, flat=FLAT_MIB),
            "own_mib": self.own_mib.summary(flat_share=FLAT_SHARE, flat=FLAT_MIB),
            "descriptors": self.descriptors.summary(flat_share=0.0, flat=FLAT_COUNT),
            "threads": self.threads.summary(flat_share=0.0, flat=FLAT_COUNT),
        }

    @property
    def grows(self) -> list[str]:
        """Returns the names of the figures that grow.

        Memory is what the process has of its own. PSS would also grow when another program ends
        that had the same libraries open.
        """
        found = self.summary()
        return [n for n in ("own_mib", "descriptors", "threads") if found[n]["grows"]]


def own_memory_mib(pid: int) -> float:
    """Anonymous and shared memory of a process (PSS), without the pages of mapped files."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {name: int(value) for name, value, *_ in (line.split() for line in lines)}
    return (kib["Pss_Anon:"] + kib["Pss_Shmem:"]) / 1024


class ClusterProcesses:
    """All processes of a cluster; those that come later are found, too."""

    def __init__(self, cluster_id: str, launcher_pid: int) -> None:
        self._cluster_id = cluster_id
        self._launcher_pid = launcher_pid
        self._began = time.monotonic()
        self._names: dict[int, str] = {}
        self.series: dict[str, ProcessSeries] = {}

    def sample(self) -> None:
        at_s = time.monotonic() - self._began
        living = {*cluster_processes(self._cluster_id), self._launcher_pid}
        for pid in living:
            try:
                self._sample_one(pid, at_s)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        for series in self.series.values():
            series.is_gone = series.pid not in living

    def _sample_one(self, pid: int, at_s: float) -> None:
        process = psutil.Process(pid)
        with process.oneshot():
            memory = process.memory_full_info()
            if not memory.rss:  # a zombie
                return
            series = self._series_of(process, at_s)
            series.rss_mib.add(at_s, memory.rss / MIB)
            series.pss_mib.add(at_s, memory.pss / MIB)
            series.own_mib.add(at_s, own_memory_mib(process.pid))
            series.descriptors.add(at_s, process.num_fds())
            series.threads.add(at_s, process.num_threads())

    def _series_of(self, process: psutil.Process, at_s: float) -> ProcessSeries:
        name = self._names.get(process.pid)
        if name is None:
            name = "launcher"
            if process.pid != self._launcher_pid:
                name = name_of(process)
            if name in self.series:
                name = f"{name} ({process.pid})"
            self._names[process.pid] = name
            self.series[name] = ProcessSeries(process.pid, at_s)
        return self.series[name]


def name_of(process: psutil.Process) -> str:
    """Returns a process's name, such as `decode-0` or `decode-0 engine`."""
    command = process.cmdline()
    line = " ".join(command)
    for flag in ("--worker-id", "--router-id"):
        if flag in command[:-1]:
            return command[command.index(flag) + 1]
    for mark, name in (
        ("engine_process", "engine"),
        ("resource_tracker", "resource tracker"),
        ("multiprocessing", "tokenizer"),
    ):
        if mark in line:
            parent = process.parent()
            return f"{name_of(parent)} {name}" if parent else name
    for mark, name in (
        ("guardian.py", "guardian"),
        ("valkey", "redis"),
        ("redis-server", "redis"),
        ("gcs_server", "ray gcs_server"),
        ("raylet/raylet", "ray raylet"),
        ("tandem.cluster.ray.controller", "pool controller"),
        ("tandem.cluster.ray.head", "head process"),
    ):
        if mark in line:
            return name
    if line.startswith("ray::"):
        return line.split(".")[0].strip()  # a title is padded to the length of the one before
    return " ".join(part.rsplit("/", 1)[-1] for part in command[:3]) or "?"

"""Measures what an idle cluster takes: CPU time, wake-ups and memory of each process.

    python -m benchmarks.cluster.idle [--seconds 60] [--options "--device cpu"]

Starts `tandem up` (one prefill and one decode worker, SmolLM2) on free ports, sends two requests,
waits until the cluster is idle, measures, and stops it. Writes benchmarks/results/idle.json. Other
programs may run meanwhile, but they make the processes wake up a little more expensively.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.shared.cluster import START_DEADLINE_S, Cluster, up, wait_for
from benchmarks.shared.requests import send_alone
from benchmarks.soak.process_growth import MIB, name_of
from tandem.cluster.launch.options import LaunchOptions
from tandem.engine.memory import worker_need
from tandem.models.source import BUILT_IN, resolve
from tandem_bench.framework import RESULTS, Report, options, run_main

NUM_WORKERS = 2
_SWITCHES = re.compile(r"^voluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)


@options
class Options:
    seconds: float = 60.0
    settle_s: float = 20.0
    """Seconds between the last request and the measurement."""
    options: str = ""
    """More options of `tandem up`."""
    output: Path = RESULTS / "idle.json"


def main(options: Options = Options()) -> None:
    report = Report(options.output)
    with up(*options.options.split()) as cluster:
        send_alone(cluster.url, [7] * 600, 4)  # is prefilled on one worker and decoded on the other
        send_alone(cluster.url, [504, 3575, 282, 4649, 314], 2)
        screen = cluster.folder / "up.log"
        wait_for(
            lambda: "Ray's head is up" in screen.read_text(),
            deadline_s=START_DEADLINE_S,
            what="Ray's head",
            interval_s=0.5,
        )
        time.sleep(options.settle_s)
        figures = measure(cluster, options.seconds)
    report.write(**figures)
    print(json.dumps(figures, indent=1))


@dataclass
class _Use:
    """What one process has used so far."""

    cpu_s: float
    num_wakes: int  # how often its threads have slept and woken

    @classmethod
    def of(cls, process: psutil.Process) -> _Use:
        times = process.cpu_times()
        statuses = Path(f"/proc/{process.pid}/task").glob("*/status")
        found = [_SWITCHES.search(status.read_text()) for status in statuses]
        return cls(times.user + times.system, sum(int(each[1]) for each in found if each))


def measure(cluster: Cluster, seconds: float) -> dict[str, Any]:
    """Measures the processes of an idle cluster.

    `processes` has for each process the percent of one core, the wake-ups of its threads per second
    and its proportional memory (PSS) in MiB. `cpu_percent` and `pss_mib` have the sums by kind, and
    `pss_beyond_mib` is the sum of all without KV pools and weights.
    """
    processes = cluster.processes()
    names = {p: name_of(p) if p.pid != cluster.process.pid else "launcher" for p in processes}
    before = {p: _Use.of(p) for p in processes}
    time.sleep(seconds)
    rows: dict[str, dict[str, float]] = {}
    cpu: dict[str, float] = defaultdict(float)
    memory: dict[str, float] = defaultdict(float)
    for p in processes:
        now = _Use.of(p)
        percent = (now.cpu_s - before[p].cpu_s) / seconds * 100
        pss_mib = p.memory_full_info().pss / MIB
        name = names[p] if names[p] not in rows else f"{names[p]} ({p.pid})"
        rows[name] = {
            "cpu_percent": round(percent, 2),
            "wakes_per_s": round((now.num_wakes - before[p].num_wakes) / seconds, 1),
            "pss_mib": round(pss_mib, 1),
        }
        cpu[_kind(name)] += percent
        memory[_kind(name)] += pss_mib
    need = worker_need(LaunchOptions().engine, resolve(BUILT_IN), kernels="torch")
    pools_and_weights = NUM_WORKERS * (need.pool_bytes + need.weights_bytes) / MIB
    return {
        "processes": dict(sorted(rows.items())),
        "cpu_percent": _rounded({**cpu, "all": sum(cpu.values())}, 2),
        "pss_mib": _rounded({**memory, "all": sum(memory.values())}, 1),
        "pools_and_weights_mib": round(pools_and_weights, 1),
        "pss_beyond_mib": round(sum(memory.values()) - pools_and_weights, 1),
    }


def _kind(name: str) -> str:
    """Says whether a process is Tandem's, Ray's or Redis."""
    if name.startswith("ray"):
        return "ray"
    return "redis" if name == "redis" else "tandem"


def _rounded(values: dict[str, float], digits: int) -> dict[str, float]:
    return {name: round(value, digits) for name, value in sorted(values.items())}


if __name__ == "__main__":
    run_main(main)

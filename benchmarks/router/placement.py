"""Measures the duration of the router's `choose`.

    python -m benchmarks.router.placement [--json FILE]

Workers with measured rates and random load; some that hold parts of the prompt. Goals: 50 us among
8 workers, 250 us among 1,000, by the median.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from random import Random

from tandem.common.perf_model.predict import queue_seconds
from tandem.common.worker_load import WorkerLoad
from tandem.ops.simulator.scenario import DEFAULT_PAIR, DEFAULT_RATES
from tandem.router.placement.choose import Roster, Work, WorkerSnapshot, choose
from tandem_bench.framework import Report, options, run_main

GOALS_US = {8: 50.0, 1000: 250.0}
ROUNDS = {8: 20_000, 1000: 2_000}


def make_workers(num_prefill: int, num_decode: int, rng: Random) -> list[WorkerSnapshot]:
    roles = ["prefill"] * num_prefill + ["decode"] * num_decode
    pairs = {f"w{n}": DEFAULT_PAIR for n in range(len(roles))}
    return [
        WorkerSnapshot(
            worker_id=f"w{n}",
            epoch=f"w{n}/1",
            address="127.0.0.1:1",
            role=role,
            state="ready",
            load=WorkerLoad(
                num_running=rng.randrange(40),
                queued_tokens=(queued := rng.randrange(30_000)),
                queued_s=queue_seconds(DEFAULT_RATES, queued),  # workers report it
                blocks_total=6000,
                blocks_used=rng.randrange(3000),
            ),
            rates=DEFAULT_RATES,
            pairs=pairs,
        )
        for n, role in enumerate(roles)
    ]


def measure(num_prefill: int, num_decode: int, num_holders: int) -> dict[str, float]:
    rng = Random(0)
    workers = make_workers(num_prefill, num_decode, rng)
    holders = rng.sample(workers, num_holders)
    matches = {w.worker_id: 1 + rng.randrange(20) for w in holders}
    work = Work(12_000, 512)
    times, roster = [], Roster(workers)
    for _ in range(ROUNDS[len(workers)]):
        started = time.perf_counter()
        choose(work, roster, matches, rng)
        times.append((time.perf_counter() - started) * 1e6)
    return {
        "prefill": num_prefill,
        "decode": num_decode,
        "holders": num_holders,
        "median_us": statistics.median(times),
        "p99_us": statistics.quantiles(times, n=100)[98],
        "goal_us": GOALS_US[len(workers)],
    }


@options
class Options:
    json: Path | None = None
    """Results file."""


def main(options: Options = Options()) -> None:
    report = Report(options.json)
    rows = [
        measure(num_prefill, num_decode, num_holders)
        for num_prefill, num_decode in ((0, 8), (4, 4), (0, 1000), (500, 500))
        for num_holders in (0, 3, num_prefill + num_decode)
    ]
    for row in rows:
        print(
            f"{row['prefill']:4} prefill {row['decode']:4} decode {row['holders']:4} holders: "
            f"median {row['median_us']:6.1f} us, p99 {row['p99_us']:7.1f} us "
            f"(goal {row['goal_us']:.0f})"
        )
    report.write(rows=rows)


if __name__ == "__main__":
    run_main(main)

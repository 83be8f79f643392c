"""Measures what a batch takes from interactive requests, and how much of the rest it uses.

    python -m benchmarks.cluster.batches [--lines 10000] [--seconds 120] [--pairs 5] [--load 0.3]

A cluster of `tandem up` with one prefill and one decode worker. First, in turn:

    alone         a batch on the idle cluster: its lines a second
    capacity      8 clients of interactive requests that ask again at once: their requests a second

Then pairs of runs of interactive requests, in an open loop with Poisson arrivals at `load` times
the capacity. Both runs of a pair have the same arrivals, and other prompts, as cached ones would be
faster. One run of each pair has a batch beside it, and which run comes first alternates. A batch
should get the lines that the interactive requests leave:

    left = alone * (1 - requests a second / capacity)

The claims, each in the median of the pairs: TTFT and the time between tokens (ITL) at p90 are at
most 1.10 times those without the batch, and the batch gets at least 80% of `left`. Exit status 1 if
one does not hold. Writes benchmarks/results/batches.json.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import httpx

from benchmarks.shared.cluster import up, wait_for
from benchmarks.shared.requests import (
    Ask,
    Seen,
    client_of,
    closed_loop,
    open_loop,
    random_prompt,
)
from tandem_bench.framework import RESULTS, Report, options, quantile, run_main

LINE_IN, LINE_OUT = 64, 16  # tokens
ASK_IN, ASK_OUT = 256, 32
CLIENTS = 8
SETTLE_S = 5.0  # a batch runs this long before its lines are counted
SLOWER_MAX, SHARE_LEAST = 1.10, 0.80
DEADLINE_S = 600.0
_ENDED = ("completed", "failed", "expired", "cancelled")


@options
class Options:
    lines: int = 10_000
    """Lines of the batch in each run. The rest of a batch is cancelled at the end of its run."""
    seconds: float = 120.0
    """Seconds of interactive requests in each run."""
    pairs: int = 5
    load: float = 0.3
    """Interactive requests, as a share of the capacity."""
    seed: int = 0
    output: Path = RESULTS / "batches.json"


def main(options: Options = Options()) -> int:
    report, rng = Report(options.output), Random(options.seed)
    pools = ("--prefill", "1", "--decode", "1", "--num-blocks", "4000")
    with tempfile.TemporaryDirectory() as files, up(*pools, "--files-url", files) as cluster:
        asyncio.run(saturate(cluster.url, rng, 5.0))
        capacity = asyncio.run(saturate(cluster.url, rng, options.seconds / 4))
        with batch(cluster.url, options.lines, rng) as lines:
            time.sleep(SETTLE_S)
            alone = lines.rate(options.seconds / 4)
        cluster.wait_idle()
        print(f"alone {alone:.2f} lines/s, capacity {capacity:.2f} requests/s", flush=True)
        pairs = []
        for number in range(options.pairs):
            times = list(arrivals(rng, options.load * capacity, options.seconds))
            runs: dict[bool, dict[str, float]] = {}
            for is_beside in (False, True) if number % 2 else (True, False):
                runs[is_beside] = run(cluster.url, times, options, rng, is_beside=is_beside)
                cluster.wait_idle()
            pairs.append(compare(runs[False], runs[True], alone, capacity))
            print(json.dumps(pairs[-1]), flush=True)
    medians = {name: median(pair[name] for pair in pairs) for name in pairs[0]}
    report.write(
        alone=alone,
        capacity=capacity,
        load=options.load,
        seconds=options.seconds,
        lines=options.lines,
        pairs=pairs,
        medians=medians,
    )
    print(json.dumps({"medians": medians}))
    is_quick = max(medians["ttft_times"], medians["itl_times"]) <= SLOWER_MAX
    return not (is_quick and medians["share"] >= SHARE_LEAST)


async def saturate(url: str, rng: Random, seconds: float) -> float:
    """Returns the interactive requests a second that the cluster serves at most."""
    began = time.perf_counter()
    done = 0

    def endless() -> Iterator[Ask]:
        nonlocal done
        while time.perf_counter() - began < seconds:
            done += 1
            yield Ask(random_prompt(rng, ASK_IN), ASK_OUT)

    async with client_of(url) as client:
        await closed_loop(client, endless(), CLIENTS)  # type: ignore[arg-type]
    return done / (time.perf_counter() - began)


def arrivals(rng: Random, rate: float, seconds: float) -> Iterator[float]:
    at_s = rng.expovariate(rate)
    while at_s < seconds:
        yield at_s
        at_s += rng.expovariate(rate)


def run(
    url: str, times: Sequence[float], options: Options, rng: Random, *, is_beside: bool
) -> dict[str, float]:
    asks = [Ask(random_prompt(rng, ASK_IN), ASK_OUT, at_s) for at_s in times]
    if not is_beside:
        return asyncio.run(measure(url, asks, options.seconds))
    with batch(url, options.lines, rng) as lines:
        time.sleep(SETTLE_S)
        before, began = lines.num_done(), time.perf_counter()
        found = asyncio.run(measure(url, asks, options.seconds))
        found["lines_per_s"] = (lines.num_done() - before) / (time.perf_counter() - began)
        return found


async def measure(url: str, asks: Sequence[Ask], seconds: float) -> dict[str, float]:
    async with client_of(url) as client:
        seen = await open_loop(client, asks, seconds + DEADLINE_S)
    done: list[Seen] = [each for each in seen if each is not None]
    gaps = [after - before for each in done for before, after in pairwise(each.token_s)]
    return {
        "ttft_p90_s": quantile([each.ttft_s for each in done], 0.9),
        "itl_p90_s": quantile(gaps, 0.9),
        "requests_per_s": len(done) / seconds,
    }


def compare(
    without: dict[str, float], beside: dict[str, float], alone: float, capacity: float
) -> dict[str, float]:
    left = alone * max(0.0, 1 - without["requests_per_s"] / capacity)
    return {
        "ttft_times": beside["ttft_p90_s"] / without["ttft_p90_s"],
        "itl_times": beside["itl_p90_s"] / without["itl_p90_s"],
        "share": beside["lines_per_s"] / left,
        "lines_per_s": beside["lines_per_s"],
        "ttft_p90_s": without["ttft_p90_s"],
        "itl_p90_s": without["itl_p90_s"],
    }


class Lines:
    """A batch that runs."""

    def __init__(self, client: httpx.Client, batch_id: str) -> None:
        self._client = client
        self._path = f"/v1/batches/{batch_id}"

    def read(self) -> dict[str, Any]:
        return dict(self._client.get(self._path).raise_for_status().json())

    def num_done(self) -> int:
        found = self.read()
        if found["status"] != "in_progress":
            raise RuntimeError(f"the batch is {found['status']}; give it more lines")
        return int(found["request_counts"]["completed"])

    def rate(self, seconds: float) -> float:
        """Returns the lines a second during the next seconds."""
        before, began = self.num_done(), time.perf_counter()
        time.sleep(seconds)
        return (self.num_done() - before) / (time.perf_counter() - began)

    def cancel(self) -> None:
        if self.read()["status"] not in _ENDED:
            self._client.post(f"{self._path}/cancel", json={})
        wait_for(
            lambda: self.read()["status"] in _ENDED, deadline_s=DEADLINE_S, what="end of the batch"
        )


@contextmanager
def batch(url: str, num_lines: int, rng: Random) -> Iterator[Lines]:
    """Runs a batch whose prompts are in no cache."""
    body = {"max_tokens": LINE_OUT, "temperature": 0, "ignore_eos": True}
    lines = "".join(
        json.dumps(
            {
                "custom_id": f"{n}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {**body, "prompt": random_prompt(rng, LINE_IN)},
            }
        )
        + "\n"
        for n in range(num_lines)
    )
    with httpx.Client(base_url=url, timeout=60) as client:
        form = {"file": ("lines.jsonl", lines.encode()), "purpose": (None, b"batch")}
        file = client.post("/v1/files", files=form).raise_for_status().json()
        sent = {
            "input_file_id": file["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        made = client.post("/v1/batches", json=sent).raise_for_status().json()
        running = Lines(client, made["id"])
        wait_for(
            lambda: running.read()["status"] != "validating",
            deadline_s=DEADLINE_S,
            what="a validated batch",
            interval_s=0.2,
        )
        try:
            yield running
        finally:
            running.cancel()
            client.delete(f"/v1/files/{file['id']}")


if __name__ == "__main__":
    run_main(main)

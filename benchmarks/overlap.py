"""Measures the part of a transfer that a request sees: overlapped, not overlapped, or without one.

    python benchmarks/overlap.py [--lengths 512,2048,6000] [--repeats 10]

Three clusters of one prefill and one decode worker, one core each, NIXL, take turns:

    overlapped  blocks travel while the next chunk is computed (the default)
    after       the same, but the consumer pulls only when the prompt is computed whole
    local       the decode worker prefills itself; nothing travels

For each prompt length, medians over the repeats: time to first token (TTFT) as the client sees it,
time to the second, the transfer's own time, and its exposed part: from the first token until the
blocks may be used. Writes benchmarks/results/overlap.json and prints the table of
docs/measurements.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parent.parent))

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tests.harness.cluster import LocalCluster

RESULTS = Path(__file__).parent / "results" / "overlap.json"
KINDS = {
    "overlapped": ["--prefill-at", "remote"],
    "after": ["--prefill-at", "remote", "--no-overlap"],
    "local": ["--prefill-at", "local"],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--lengths", default="512,2048,6000")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--transport", default="nixl")
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.lengths.split(",")]
    with clusters(arguments.transport) as running:
        rows = [
            measure(running, length, arguments.repeats)
            for length in track(lengths, description="prompt lengths")
        ]
    keep(rows)
    print_table(rows)


def keep(rows: list[dict[str, Any]]) -> None:
    """Write the rows; those of lengths that this run did not measure stay as they were."""
    earlier = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    by_length = {row["prompt_tokens"]: row for row in [*earlier, *rows]}
    RESULTS.parent.mkdir(exist_ok=True)
    result = {"rows": [by_length[n] for n in sorted(by_length)], "load_average": os.getloadavg()}
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")


@contextmanager
def clusters(transport: str) -> Iterator[dict[str, LocalCluster]]:
    """All of them up at once: an idle one takes 3% of a core, and turns are taken one by one."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis = EmbeddedRedis(folder / "redis")
        redis.start()
        stack.callback(redis.stop)
        started = {}
        for kind, options in KINDS.items():
            place = folder / kind
            place.mkdir()
            cluster = LocalCluster(redis, place, options=("--transport", transport, *options))
            stack.callback(cluster.close)
            cluster.start_router()
            cluster.start_worker("prefill-0", "prefill", "--cores", "0")
            cluster.start_worker("decode-0", "decode", "--cores", "1")
            started[kind] = cluster
        for cluster in started.values():
            cluster.wait_ready()
        yield started


def measure(running: dict[str, LocalCluster], length: int, repeats: int) -> dict[str, Any]:
    samples: dict[str, list[dict[str, float]]] = {kind: [] for kind in running}
    for turn in range(repeats + 1):
        prompt = [
            (token * 31 + (turn * 7 + length) * 7919) % 40_000 + 100 for token in range(length)
        ]
        for kind, cluster in running.items():
            sample = ask(cluster, prompt)
            if turn:  # the first of each is a warm-up
                samples[kind].append(sample)
    medians = {
        kind: {name: statistics.median(s[name] for s in taken) for name in taken[0]}
        for kind, taken in samples.items()
    }
    overlapped, after, local = (medians[kind] for kind in KINDS)
    return {
        "prompt_tokens": length,
        "medians_ms": {k: {n: round(v, 2) for n, v in m.items()} for k, m in medians.items()},
        "exposed_of_not_overlapped": round(overlapped["exposed_ms"] / after["exposed_ms"], 4),
        "exposed_of_ttft": round(overlapped["exposed_ms"] / overlapped["ttft_ms"], 5),
        "ttft_against_local": round(
            statistics.median(
                a["ttft_ms"] / b["ttft_ms"]
                for a, b in zip(samples["overlapped"], samples["local"], strict=True)
            ),
            4,
        ),
        "second_token_against_local": round(
            overlapped["second_token_ms"] / local["second_token_ms"], 4
        ),
        "samples": samples,
    }


def ask(cluster: LocalCluster, prompt: list[int]) -> dict[str, float]:
    """One request alone: times at the client, and the transfer's at the decode worker."""
    before = transfer_ms(cluster)
    body = {"prompt": prompt, "max_tokens": 4, "stream": True, "ignore_eos": True}
    times: list[float] = []
    began = time.perf_counter()
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=300) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                times.append((time.perf_counter() - began) * 1000)
    after = transfer_ms(cluster)
    moved = {name: after[name] - before[name] for name in after}
    return {"ttft_ms": times[0], "second_token_ms": times[1], **moved}


def transfer_ms(cluster: LocalCluster) -> dict[str, float]:
    """Sums of the decode worker's histograms, milliseconds."""
    wanted = {
        "tandem_transfer_exposed_seconds_sum": "exposed_ms",
        "tandem_transfer_seconds_sum": "transfer_ms",
    }
    sums = dict.fromkeys(wanted.values(), 0.0)
    address = cluster.records()["decode-0"]["metrics_address"]
    for line in httpx.get(f"http://{address}/metrics").text.splitlines():
        name = wanted.get(line.partition("{")[0])
        if name:
            sums[name] += float(line.rsplit(" ", 1)[1]) * 1000
    return sums


def print_table(rows: list[dict[str, Any]]) -> None:
    print("| prompt | TTFT local | overlapped | ratio | exposed | of not overlapped | of TTFT |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        medians = row["medians_ms"]
        print(
            f"| {row['prompt_tokens']:,} | {medians['local']['ttft_ms']:,.0f} ms "
            f"| {medians['overlapped']['ttft_ms']:,.0f} ms | {row['ttft_against_local']:.3f} "
            f"| {medians['overlapped']['exposed_ms']:.2f} ms of "
            f"{medians['after']['exposed_ms']:.2f} | {row['exposed_of_not_overlapped']:.1%} "
            f"| {row['exposed_of_ttft']:.2%} |"
        )


if __name__ == "__main__":
    main()

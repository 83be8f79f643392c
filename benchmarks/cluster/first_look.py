"""Measures a new user's first minutes: time to the first token, and a repeated long prompt.

    python -m benchmarks.cluster.first_look [--repeats 5]

Starts `tandem up` (one prefill and one decode worker) on free ports, measures, stops it. Writes
benchmarks/results/first_look.json and prints the table of docs/measurements.md. Run it on a quiet
machine; the model must have been converted once (any earlier start does that).
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.shared.cluster import Cluster, up
from benchmarks.shared.requests import send_alone
from tandem_bench.framework import RESULTS, Report, options, ratios, run_main

PROMPT_TOKENS = 1500
PULLED = "tandem_kv_bytes_pulled_total"


@options
class Options:
    repeats: int = 5
    output: Path = RESULTS / "first_look.json"


def main(options: Options = Options()) -> None:
    report, began = Report(options.output), time.perf_counter()
    with up() as cluster:
        send_alone(cluster.url, [504, 3575, 282, 4649, 314], 2)
        first_token_s = time.perf_counter() - began
        start = {"ready_s": cluster.start_s, "first_token_s": first_token_s}
        send_alone(cluster.url, [7] * 600, 4)  # joins the pair and warms both engines
        figures = {
            "start": start,
            "repeated_prompt": _measure_repeats(cluster, options.repeats),
        }
    report.write(**figures)
    print(json.dumps(figures, indent=1))


def _measure_repeats(cluster: Cluster, repeats: int) -> dict[str, Any]:
    rounds = []
    for n in range(repeats):
        prompt = [(token * 31 + n * 7919) % 40_000 + 100 for token in range(PROMPT_TOKENS)]
        moved = [cluster.metric(PULLED)]
        seen = []
        for _ in range(2):
            seen.append(send_alone(cluster.url, prompt, 2))
            moved.append(cluster.metric(PULLED))
        rounds.append((seen, moved))
    first, again = ([seen[i].ttft_s for seen, _ in rounds] for i in range(2))
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "cached_tokens": min(seen[1].num_cached for seen, _ in rounds),
        "ttft_first_ms": round(statistics.median(first) * 1000, 1),
        "ttft_again_ms": round(statistics.median(again) * 1000, 1),
        "ratio": round(ratios(first, again).median, 1),
        "bytes_first": statistics.median(moved[1] - moved[0] for _, moved in rounds),
        "bytes_again": statistics.median(moved[2] - moved[1] for _, moved in rounds),
    }


if __name__ == "__main__":
    run_main(main)

"""Measures the part of a transfer that a request sees: overlapped, not overlapped, or without one.

    python -m benchmarks.transfer.overlap [--lengths 512,2048,6000] [--repeats 10]

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

from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.shared.cluster import Cluster, up
from benchmarks.shared.requests import send_alone
from tandem_bench.framework import (
    RESULTS,
    Report,
    in_turn,
    medians,
    numbers,
    options,
    ratios,
    read,
    run_main,
    table,
)

KINDS = {
    "overlapped": ["--prefill-at", "remote"],
    "after": ["--prefill-at", "remote", "--no-overlap"],
    "local": ["--prefill-at", "local"],
}


EXPOSED = "tandem_transfer_exposed_seconds_sum"
TRANSFER = "tandem_transfer_seconds_sum"


@options
class Options:
    lengths: str = "512,2048,6000"
    """Tokens of the prompts."""
    repeats: int = 10
    transport: str = "nixl"
    output: Path = RESULTS / "overlap.json"


def main(options: Options = Options()) -> None:
    """Lengths that this run does not measure stay in the results as they were."""
    report = Report(options.output)
    by_length = {row["prompt_tokens"]: row for row in read(options.output).get("rows", ())}
    with ExitStack() as stack:
        # All are up at once: an idle one takes little, and they take turns.
        clusters = {
            kind: stack.enter_context(up("--transport", options.transport, *chosen))
            for kind, chosen in KINDS.items()
        }
        lengths = numbers(options.lengths)
        for length in track(lengths, description="prompt lengths"):
            by_length[length] = measure(clusters, length, options.repeats)
    report.write(rows=[by_length[length] for length in sorted(by_length)])
    print(
        table(
            "prompt | TTFT local | overlapped | ratio | exposed | of not overlapped | of TTFT",
            (cells_of(by_length[length]) for length in lengths),
        )
    )


def measure(clusters: dict[str, Cluster], length: int, repeats: int) -> dict[str, Any]:
    ways = {kind: partial(ask, cluster, length, count()) for kind, cluster in clusters.items()}
    samples = in_turn(ways, repeats)
    found = {kind: medians(taken, 2) for kind, taken in samples.items()}
    overlapped, after, local = (found[kind] for kind in KINDS)
    ttft = {kind: [sample["ttft_ms"] for sample in taken] for kind, taken in samples.items()}
    return {
        "prompt_tokens": length,
        "medians_ms": found,
        "exposed_of_not_overlapped": round(overlapped["exposed_ms"] / after["exposed_ms"], 4),
        "exposed_of_ttft": round(overlapped["exposed_ms"] / overlapped["ttft_ms"], 5),
        "ttft_against_local": round(ratios(ttft["overlapped"], ttft["local"]).median, 4),
        "second_token_against_local": round(
            overlapped["second_token_ms"] / local["second_token_ms"], 4
        ),
        "samples": samples,
    }


def ask(cluster: Cluster, length: int, turns: count[int]) -> dict[str, float]:
    """Sends one request alone. Returns its times at the client, and the transfer's at the decode
    worker, in ms."""
    offset = (next(turns) * 7 + length) * 7919
    prompt = [(token * 31 + offset) % 40_000 + 100 for token in range(length)]
    before = [cluster.metric(name, "decode") for name in (EXPOSED, TRANSFER)]
    seen = send_alone(cluster.url, prompt, 4)
    after = [cluster.metric(name, "decode") for name in (EXPOSED, TRANSFER)]
    exposed_s, transfer_s = (b - a for a, b in zip(before, after, strict=True))
    return {
        "ttft_ms": 1000 * seen.ttft_s,
        "second_token_ms": 1000 * seen.token_s[1],
        "exposed_ms": 1000 * exposed_s,
        "transfer_ms": 1000 * transfer_s,
    }


def cells_of(row: dict[str, Any]) -> list[str]:
    overlapped, after, local = (row["medians_ms"][kind] for kind in KINDS)
    return [
        f"{row['prompt_tokens']:,}",
        f"{local['ttft_ms']:,.0f} ms",
        f"{overlapped['ttft_ms']:,.0f} ms",
        f"{row['ttft_against_local']:.3f}",
        f"{overlapped['exposed_ms']:.2f} ms of {after['exposed_ms']:.2f}",
        f"{row['exposed_of_not_overlapped']:.1%}",
        f"{row['exposed_of_ttft']:.2%}",
    ]


if __name__ == "__main__":
    run_main(main)

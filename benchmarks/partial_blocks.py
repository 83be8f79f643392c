"""Prompts that leave a cached one inside a block, with and without the copy of what both have.

    python benchmarks/partial_blocks.py [--rounds 3] [--threads 1]

Blocks of 64 tokens. Each prompt begins as a cached one does, up to each place of a block once, and
goes on with 256 tokens of its own. Two engines take turns at each prompt; one of them does not look
for beginnings of blocks. Their tokens are compared. The figures are of all prompts of all rounds.
Writes benchmarks/results/partial_blocks.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.peers.machine import conditions
from tandem.common.config.engine import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.types import Mode, NewTokens, SamplingParams, SequenceSpec
from tandem.models.source import resolve

RESULTS = Path(__file__).parent / "results" / "partial_blocks.json"
BLOCK = 64
SHARED = 4 * BLOCK  # tokens before the block in which a prompt leaves the cached one
NEW = 256  # tokens
KINDS = ("whole blocks", "parts of blocks")


def make_engine(kind: str, threads: int) -> Engine:
    config = EngineConfig(
        model="smollm2", device="cpu", block_size=BLOCK, num_blocks=256, num_threads=threads
    )
    files = resolve(config.model)
    engine = Engine(config, ModelRunner(files, config), files.fingerprint)
    if kind == "whole blocks":
        engine._kv.find_partial_block = lambda *_: None  # type: ignore[method-assign]
    return engine


def ask(engine: Engine, name: str, prompt: list[int]) -> tuple[float, int, NewTokens]:
    """Returns the TTFT in ms, the tokens computed for it, and the only token."""
    spec = SequenceSpec(name, prompt, len(prompt), Mode.LOCAL, SamplingParams(), 1)
    start, num_computed = time.perf_counter(), 0
    engine.add(spec)
    while True:
        report = engine.step()
        num_computed += report.num_prefill_tokens
        if report.new_tokens:
            return 1e3 * (time.perf_counter() - start), num_computed, report.new_tokens[0]


def run(args: argparse.Namespace) -> dict[str, Any]:
    engines = {kind: make_engine(kind, args.threads) for kind in KINDS}
    ttft_ms: dict[str, list[float]] = {kind: [] for kind in KINDS}
    computed: dict[str, list[int]] = {kind: [] for kind in KINDS}
    rng = Random(0)
    for number in range(args.rounds):
        for engine in engines.values():
            engine.reset_prefix_cache()
        base = _random(rng, SHARED + 2 * BLOCK)
        for engine in engines.values():
            ask(engine, f"base-{number}", base)
        places = list(range(BLOCK))
        rng.shuffle(places)
        for place in places:
            prompt = base[: SHARED + place] + _random(rng, NEW)
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
    return {
        "rows": rows,
        "p50_saved": 1 - after["ttft_p50_ms"] / before["ttft_p50_ms"],
        "mean_saved": 1 - after["ttft_mean_ms"] / before["ttft_mean_ms"],
        "conditions": conditions(),
    }


def _random(rng: Random, num_tokens: int) -> list[int]:
    return [rng.randrange(1000, 40000) for _ in range(num_tokens)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    result = run(parser.parse_args())
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

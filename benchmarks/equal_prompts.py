"""Many equal prompts at once, each computed, and with those that wait for the first.

    python benchmarks/equal_prompts.py [--rounds 3] [--prompts 50] [--tokens 512] [--threads 1]

Two engines take turns with a group of equal prompts that nobody had before; in one of them nobody
waits for blocks that another computes. Tokens are compared. Figures are medians over the rounds.
Writes benchmarks/results/equal_prompts.json.
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
from tandem.common.sampling_params import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.types import Mode, SequenceSpec
from tandem.models.source import resolve

RESULTS = Path(__file__).parent / "results" / "equal_prompts.json"
KINDS = ("each computes", "one computes")
ANSWER = 4  # tokens


def make_engine(kind: str, threads: int) -> Engine:
    config = EngineConfig(model="smollm2", device="cpu", num_threads=threads)
    files = resolve(config.model)
    engine = Engine(config, ModelRunner(files, config), files.fingerprint)
    if kind == "each computes":
        engine._scheduler.early_reuse.awaits = lambda *_, **__: False  # type: ignore[method-assign]
    return engine


def ask(engine: Engine, prompt: list[int], num_prompts: int) -> dict[str, Any]:
    """Returns the TTFTs in ms, the tokens computed, and the answers' tokens."""
    start, num_computed = time.perf_counter(), 0
    ttft_ms: dict[str, float] = {}
    tokens: dict[str, list[int]] = {}
    for number in range(num_prompts):
        engine.add(
            SequenceSpec(
                str(number),
                prompt,
                len(prompt),
                Mode.LOCAL,
                SamplingParams(temperature=0, max_tokens=ANSWER),
            )
        )
    while engine.has_work():
        report = engine.step()
        now = 1e3 * (time.perf_counter() - start)
        num_computed += report.num_prefill_tokens
        for new in report.new_tokens:
            ttft_ms.setdefault(new.sequence_id, now)
            tokens.setdefault(new.sequence_id, []).extend(new.token_ids)
    return {"ttft_ms": list(ttft_ms.values()), "computed": num_computed, "tokens": tokens}


def run(args: argparse.Namespace) -> dict[str, Any]:
    engines = {kind: make_engine(kind, args.threads) for kind in KINDS}
    rows: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    rng = Random(0)
    for number in range(args.rounds):
        prompt = [rng.randrange(1000, 40000) for _ in range(args.tokens)]
        answers = []
        for kind in KINDS if number % 2 else KINDS[::-1]:
            found = ask(engines[kind], prompt, args.prompts)
            answers += found["tokens"].values()
            rows[kind].append(
                {
                    "ttft_first_ms": min(found["ttft_ms"]),
                    "ttft_p50_ms": statistics.median(found["ttft_ms"]),
                    "ttft_last_ms": max(found["ttft_ms"]),
                    "computed": found["computed"],
                }
            )
        assert all(answer == answers[0] for answer in answers), "another token"
    medians = {
        kind: {name: statistics.median(row[name] for row in each) for name in each[0]}
        for kind, each in rows.items()
    }
    return {
        "prompts": args.prompts,
        "tokens": args.tokens,
        "rounds": args.rounds,
        "rows": medians,
        "conditions": conditions(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    result = run(parser.parse_args())
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

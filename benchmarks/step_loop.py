"""Measures the part of a decode step outside its compiled code: scheduling, inputs, sampling, the
report.

    python benchmarks/step_loop.py [--threads 2] [--batches 1,8,32]

One engine in this process, as a worker runs it, without a network: so many sequences of 256 tokens
decode together, greedily. Medians over the steps, in ms; the share is of the whole step. Writes
benchmarks/results/step_loop.json and prints the table of docs/measurements.md.
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

from benchmarks.load import random_prompt
from benchmarks.peers.machine import conditions
from tandem.common.config.engine import EngineConfig
from tandem.common.sampling_params import SamplingParams
from tandem.engine.cache.layout.pool_memory import populate
from tandem.engine.engine import Engine
from tandem.engine.executor.native.decoder import NativeDecoder
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.types import Mode, SequenceSpec
from tandem.models.source import resolve

RESULTS = Path(__file__).parent / "results" / "step_loop.json"
PROMPT, WARM_UP = 256, 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    before = conditions()
    folder = resolve("smollm2")
    config = EngineConfig(model="", device="cpu", num_threads=args.threads, itl_target_s=0.0)
    runner = ModelRunner(folder, config)
    decoder = runner.native
    assert decoder is not None, "this machine has no compiled kernels"
    engine = Engine(config, runner, folder.fingerprint)
    populate(runner.kv.data_ptr(), runner.kv.nbytes).join()
    rows = [measure(engine, decoder, int(word), args.steps) for word in args.batches.split(",")]
    results = {"before": before, "after": conditions(), "threads": args.threads, "rows": rows}
    args.output.write_text(json.dumps(results, indent=1) + "\n")
    print(table(rows))


def measure(engine: Engine, decoder: NativeDecoder, batch: int, steps: int) -> dict[str, Any]:
    rng, names = Random(batch), [f"{batch}-{number}" for number in range(batch)]
    for name in names:
        prompt = random_prompt(rng, PROMPT)
        engine.add(
            SequenceSpec(
                name,
                prompt,
                PROMPT,
                Mode.LOCAL,
                SamplingParams(temperature=0, max_tokens=10 * steps),
            )
        )
    waiting = set(names)
    while waiting:
        waiting -= {each.sequence_id for each in engine.step().new_tokens}
    taken = []
    for _ in range(WARM_UP + steps):
        decoder.take_stages()
        began = time.perf_counter()
        report = engine.step()
        whole = time.perf_counter() - began
        assert len(report.new_tokens) == batch
        taken.append((whole, sum(decoder.take_stages().values())))
    for name in names:
        engine.remove(name)
    engine.step()
    taken = taken[WARM_UP:]
    return {
        "batch": batch,
        "step_ms": round(1e3 * statistics.median(whole for whole, _ in taken), 3),
        "compiled_ms": round(1e3 * statistics.median(inside for _, inside in taken), 3),
        "loop_ms": round(1e3 * statistics.median(whole - inside for whole, inside in taken), 3),
        "share": round(statistics.median(1 - inside / whole for whole, inside in taken), 4),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| batch | step | compiled code | the loop | share |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['batch']} | {row['step_ms']:.2f} ms | {row['compiled_ms']:.2f} ms "
        f"| {row['loop_ms']:.2f} ms | {row['share']:.1%} |"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

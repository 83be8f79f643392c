"""Decode steps with LoRA adapters beside steps of the base model alone.

    python benchmarks/lora.py [--batch 32] [--context 128] [--threads 1]

Rows: rank 8 on q, k, v and o, and rank 16 on all matrices; one adapter for all, and eight of them.
The base and all rows take turns with one step each; the figure is the median of the ratios of each
turn, with the quartiles beside it. Weights are kept as their file has them: the built-in model's in
Q4_1. Writes benchmarks/results/lora.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.peers.machine import conditions
from tandem.common.config.engine import EngineConfig
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem.models.source import resolve
from tests.lora_adapters import ALL, ATTENTION, describe, write_adapter

RESULTS = Path(__file__).parent / "results" / "lora.json"
KINDS: Mapping[str, tuple[int, Sequence[str]]] = {
    "rank 8 on q, k, v, o": (8, ATTENTION),
    "rank 16 on all": (16, ALL),
}
COUNTS = (1, 8)  # adapters in a step
WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    before = conditions()
    steps = Steps(args.model, args.batch, args.context, args.threads)
    rows = measure(steps, args.turns)
    results = {
        "before": before,
        "after": conditions(),
        "model": args.model,
        "weights": steps.files,
        "dtype": steps.dtype,
        "kv_dtype": steps.kv_dtype,
        "instructions": steps.instructions,
        "batch": args.batch,
        "context": args.context,
        "threads": args.threads,
        "rows": rows,
    }
    args.output.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{before['cpu']}, {steps.instructions}, {steps.dtype}, KV in {steps.kv_dtype}")
    print(table(rows))


class Steps:
    """A model with its adapters, and the batches of decode steps over one pool."""

    def __init__(self, model: str, batch: int, context: int, threads: int) -> None:
        folder = resolve(model)
        config = EngineConfig(model="", device="cpu", num_threads=threads)
        self._runner = ModelRunner(folder, config)
        self.files = [file.name for file in folder.weight_files]
        self.dtype = self._runner.dtype_name  # "+blocks": quantized as in the file
        self.kv_dtype = self._runner.kv_dtype_name
        native = self._runner.native
        self.instructions = native.instructions if native else None  # of the compiled kernels
        each = -(-context // config.block_size)
        self._runner.allocate(batch * each)
        blocks = list(range(batch * each))
        Random(1).shuffle(blocks)
        self._tables = [blocks[i * each : (i + 1) * each] for i in range(batch)]
        self._context = context
        self.adapters: dict[str, list[str]] = {}
        with tempfile.TemporaryDirectory() as made:
            for kind, (rank, targets) in KINDS.items():
                for number in range(max(COUNTS)):
                    path = Path(made) / f"{rank}-{number}"
                    write_adapter(
                        path, folder.config, seed=number, r=rank, target_modules=list(targets)
                    )
                    adapter = describe("any", path, folder.config)
                    self._runner.add_adapter(self._runner.load_adapter(adapter))
                    self.adapters.setdefault(kind, []).append(adapter.digest)
        tokens = Random(2).choices(range(100, 40_000), k=context)
        for table in self._tables:
            self._runner.forward(StepBatch([SequenceSlice(tokens, context, table, False)]))

    def seconds(self, digests: Sequence[str]) -> float:
        """Returns the time of a step whose sequences have these adapters in turn."""
        slices = [
            SequenceSlice(
                [row + 100], self._context, table, True, adapter=digests[row % len(digests)]
            )
            for row, table in enumerate(self._tables)
        ]
        batch = StepBatch(slices)
        started = time.perf_counter()
        self._runner.forward(batch)
        return time.perf_counter() - started


def measure(steps: Steps, turns: int) -> list[dict[str, Any]]:
    cases = {(kind, count): steps.adapters[kind][:count] for kind in KINDS for count in COUNTS}
    seconds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    base: list[float] = []
    for turn in range(turns + WARM_UP):
        of_base = steps.seconds([""])
        of_cases = {case: steps.seconds(digests) for case, digests in cases.items()}
        if turn >= WARM_UP:
            base.append(of_base)
            for case, taken in of_cases.items():
                seconds[case].append(taken)
    rows = []
    for (kind, count), taken in seconds.items():
        ratios = [one / other for one, other in zip(taken, base, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append(
            {
                "kind": kind,
                "adapters": count,
                "base_ms": statistics.median(base) * 1000,
                "ms": statistics.median(taken) * 1000,
                "ratio": middle,
                "quartiles": [low, high],
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| adapters | in a step | base, ms | ms | ratio (quartiles) |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["quartiles"]
        lines.append(
            f"| {row['kind']} | {row['adapters']} | {row['base_ms']:.1f} | {row['ms']:.1f} "
            f"| {row['ratio']:.3f} ({low:.3f} to {high:.3f}) |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""Decode steps with LoRA adapters beside steps of the base model alone.

    python -m benchmarks.engine.lora [--batch 32] [--context 128] [--threads 1]

Rows: rank 8 on q, k, v and o, and rank 16 on all matrices; one adapter for all, and eight of them.
The base and all rows take turns with one step each; the figure is the median of the ratios of each
turn, with the quartiles beside it. Weights are kept as their file has them: the built-in model's in
Q4_1. Writes benchmarks/results/lora.json.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file

from tandem.common.adapter import Adapter
from tandem.common.config.engine import EngineConfig
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem.models.config.model import ModelConfig
from tandem.models.lora.adapter import open_lora
from tandem.models.lora.targets import linear_shapes
from tandem.models.source import resolve
from tandem_bench.framework import RESULTS, Report, in_turn, options, ratios, run_main, table

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
BASE = ("", 0)
KINDS: Mapping[str, tuple[int, Sequence[str]]] = {
    "rank 8 on q, k, v, o": (8, ATTENTION),
    "rank 16 on all": (16, ALL),
}
COUNTS = (1, 8)  # adapters in a step
WARM_UP = 3


@options
class Options:
    model: str = "smollm2"
    batch: int = 32
    context: int = 128
    threads: int = 1
    turns: int = 40
    output: Path = RESULTS / "lora.json"


def main(options: Options = Options()) -> None:
    report = Report(options.output)
    steps = Steps(options.model, options.batch, options.context, options.threads)
    cases = {(kind, count): steps.adapters[kind][:count] for kind in KINDS for count in COUNTS}
    ways = {
        case: partial(steps.seconds, digests) for case, digests in {BASE: [""], **cases}.items()
    }
    taken = in_turn(ways, options.turns, warm_up=WARM_UP)
    base_ms, rows, cells = statistics.median(taken[BASE]) * 1000, [], []
    for kind, count in cases:
        ms, ratio = (
            statistics.median(taken[kind, count]) * 1000,
            ratios(taken[kind, count], taken[BASE]),
        )
        row = {"kind": kind, "adapters": count, "base_ms": base_ms, "ms": ms}
        rows.append(row | {"ratio": ratio.median, "quartiles": [ratio.low, ratio.high]})
        cells.append((kind, count, f"{base_ms:.1f}", f"{ms:.1f}", ratio))
    report.write(
        model=options.model,
        weights=steps.files,
        dtype=steps.dtype,
        kv_dtype=steps.kv_dtype,
        instructions=steps.instructions,
        batch=options.batch,
        context=options.context,
        threads=options.threads,
        rows=rows,
    )
    cpu = report.before["cpu"]
    print(f"{cpu}, {steps.instructions}, {steps.dtype}, KV in {steps.kv_dtype}")
    print(table("adapters | in a step | base, ms | ms | ratio (quartiles)", cells))


def write_adapter(
    path: Path, model: ModelConfig, *, seed: int, rank: int, modules: Sequence[str]
) -> Adapter:
    """Writes an adapter of random weights in PEFT's format."""
    path.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": list(modules)}
    (path / "adapter_config.json").write_text(json.dumps(config))
    random, stored = torch.Generator().manual_seed(seed), {}
    for name, (num_out, num_in) in linear_shapes(model).items():
        if name.endswith(tuple(modules)):
            for part, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
                weights = 0.15 * torch.randn(*shape, generator=random)
                stored[f"base_model.model.{name}.lora_{part}.weight"] = weights
    save_file(stored, path / "adapter_model.safetensors")
    folder = open_lora(str(path), model, rank_max=rank)
    return Adapter("any", folder.digest(), str(path), folder.rank)


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
                    adapter = write_adapter(
                        path, folder.config, seed=number, rank=rank, modules=targets
                    )
                    self._runner.add_adapter(self._runner.load_adapter(adapter))
                    self.adapters.setdefault(kind, []).append(adapter.digest)
        tokens = Random(2).choices(range(100, 40_000), k=context)
        for block_table in self._tables:
            self._runner.forward(StepBatch([SequenceSlice(tokens, context, block_table, False)]))

    def seconds(self, digests: Sequence[str]) -> float:
        """Returns the time of a step whose sequences have these adapters in turn."""
        slices = [
            SequenceSlice(
                [row + 100], self._context, block_table, True, adapter=digests[row % len(digests)]
            )
            for row, block_table in enumerate(self._tables)
        ]
        batch = StepBatch(slices)
        started = time.perf_counter()
        self._runner.forward(batch)
        return time.perf_counter() - started


if __name__ == "__main__":
    run_main(main)

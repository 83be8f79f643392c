"""`tandem bench stages`, as a command of its own: `python -m tandem_bench.engine_stages`.

Where the time of the compiled decoder goes: each stage of a step beside what the machine would need
for it at best in the same run. That is the later of

    products   its operations, at the rate of the decoder's own largest tile with all it reads in
               the first-level cache
    bytes      its weights, or the KV that it reads, at the rate of reading memory

In brackets what the operations take at the rate of torch's best product of 1,536 x 1,536. Stages
that only prepare the next one have no bound: at best they would take nothing. Medians; nothing else
should run on the machine.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter, run
from cyclopts.validators import Number
from rich.console import Console
from rich.table import Table

from tandem.common.config.engine import EngineConfig
from tandem.common.dtypes import DTYPE_BYTES
from tandem.common.process.progress import ProgressRow, Waiting
from tandem.engine.cache.layout.pool_memory import own_pages
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem.errors import TandemError
from tandem.models.config.model import ModelConfig
from tandem_bench.engine import MODES, limits
from tandem_bench.engine_steps import (
    blocks_needed,
    decode_step,
    prefill_steps,
    resolve_dense,
)
from tandem_bench.framework import idle_percent, write
from tandem_kernels.native.library import Kind, Stage, load

_READ_BYTES = 512 << 20
_WEIGHTS = {"bf16": (Kind.BF16, 2), "fp32": (Kind.F32, 4), "int8": (Kind.I8, 1)}  # bytes of each


@dataclass(frozen=True)
class Needs:
    """The needs of one stage, summed over all steps."""

    operations: float = 0.0
    bytes_read: float = 0.0

    def __add__(self, other: Needs) -> Needs:
        return Needs(self.operations + other.operations, self.bytes_read + other.bytes_read)


def main(
    *,
    model: Annotated[str, Parameter(help="Model, as for `tandem up --model`.")] = "smollm2",
    mode: Annotated[str, Parameter(help="native bf16, native fp32 or native int8.")] = (
        "native bf16"
    ),
    threads: Annotated[str, Parameter(help="Numbers of threads, such as 1,2.")] = "1",
    prompts: Annotated[str, Parameter(help="Lengths of the prompts, in tokens.")] = "512,2048",
    batches: Annotated[str, Parameter(help="Numbers of decoding sequences.")] = "1,8,32",
    repeats: Annotated[int, Parameter(help="Samples of each row.", validator=Number(gte=1))] = 7,
    output: Annotated[Path | None, Parameter(help="JSON file to write.")] = None,
) -> None:
    """Take a step apart: each stage of the compiled decoder beside what this machine can."""
    if mode not in MODES or not mode.startswith("native"):
        print(f"no such mode: {mode}", file=sys.stderr)
        sys.exit(2)
    console = Console()
    try:
        with Waiting(ProgressRow("machine", "is watched"), redraws_per_s=0) as waiting:
            idle = round(idle_percent(2.0), 1)
            results: dict[str, Any] = {"idle_percent_before": idle, "mode": mode}
            results["rows"] = [
                row
                for count in map(int, threads.split(","))
                for row in _rows(
                    model,
                    mode,
                    count,
                    [int(word) for word in prompts.split(",")],
                    [int(word) for word in batches.split(",")],
                    repeats,
                    waiting.show,
                )
            ]
    except TandemError as error:
        console.print(f"tandem bench: {error.message}")
        sys.exit(1)
    for row in results["rows"]:
        console.print(_table(row))
    console.print(f"{results['idle_percent_before']:.0f}% of the cores idle before")
    if output is not None:
        write(output, results)
        console.print(f"written to {output}")


def _rows(
    model: str,
    mode: str,
    threads: int,
    prompts: list[int],
    batches: list[int],
    repeats: int,
    tell: Callable[[ProgressRow], None],
) -> list[dict[str, Any]]:
    tell(ProgressRow(f"{threads} thread(s)", "the model is loaded"))
    folder = resolve_dense(model)
    config = EngineConfig(model="", device="cpu", num_threads=threads, **MODES[mode])  # type: ignore[arg-type]
    runner = ModelRunner(folder, config)
    block_size = config.block_size
    runner.allocate(blocks_needed(block_size, prompt=max(prompts), batch=max(batches)))
    work = {f"decode {count}": [decode_step(count, block_size)] for count in batches}
    work |= {f"prefill {count}": prefill_steps(count, block_size) for count in prompts}
    weights, weight_bytes = _WEIGHTS[mode.split()[1]]
    machine = _machine(threads, weights)
    kv_bytes = DTYPE_BYTES[runner.kv_dtype_name]
    rows = []
    for number, (name, steps) in enumerate(work.items()):
        tell(ProgressRow(f"{threads} thread(s)", name, number, len(work)))
        needed = needs(folder.config, steps, weight_bytes, kv_bytes)
        stages = _stages(_seconds(runner, steps, repeats), needed, machine)
        rows.append({"work": name, "threads": threads, "machine": machine, "stages": stages})
    return rows


def _machine(threads: int, weights: Kind) -> dict[str, float]:
    library = load()
    assert library is not None
    kind = library.packed_kind(weights)
    memory = np.frombuffer(own_pages(_READ_BYTES), np.float32)  # in huge pages, as weights are
    memory[:] = 1.0
    return {
        "tile_gflops": max(library.product_gflops(threads, kind) for _ in range(5)),
        "torch_gflops": limits(threads)["gflops"],
        "read_gb_per_s": max(library.read_gb_per_s(memory, threads) for _ in range(5)),
    }


def _seconds(runner: ModelRunner, steps: list[StepBatch], repeats: int) -> dict[Stage, float]:
    """Medians, of all steps together; the first time does not count."""
    decoder = runner.native
    assert decoder is not None
    taken = []
    for _ in range(repeats + 1):
        decoder.take_stages()
        for step in steps:
            decoder.forward(step, runner.pools)
        taken.append(decoder.take_stages())
    return {stage: statistics.median(each[stage] for each in taken[1:]) for stage in Stage}


def needs(
    config: ModelConfig, steps: list[StepBatch], weight_bytes: int, kv_bytes: int
) -> dict[Stage, Needs]:
    """Returns the operations and bytes that each stage of these steps needs at least. Stages that
    only prepare are left out."""
    total: dict[Stage, Needs] = {}
    for step in steps:
        for stage, need in _of_step(config, step, weight_bytes, kv_bytes).items():
            total[stage] = total.get(stage, Needs()) + need
    return total


def _of_step(
    config: ModelConfig, step: StepBatch, weight_bytes: int, kv_bytes: int
) -> dict[Stage, Needs]:
    heads = config.num_attention_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_layers

    def product(num_in: int, num_out: int, rows: int, times: int = layers) -> Needs:
        if not rows:  # of a chunk that wants no logits
            return Needs()
        weights = times * num_in * num_out
        return Needs(2.0 * rows * weights, float(weights * weight_bytes))

    visible = layers * sum(map(_visible_keys, step.slices))
    context = layers * sum(piece.context_len for piece in step.slices)
    return {
        Stage.QKV: product(hidden, heads + 2 * kv, step.num_tokens),
        Stage.ATTENTION: Needs(4.0 * heads * visible, 2.0 * kv * context * kv_bytes),
        Stage.ATTENTION_OUT: product(heads, hidden, step.num_tokens),
        Stage.GATE_UP: product(hidden, 2 * inner, step.num_tokens),
        Stage.DOWN: product(inner, hidden, step.num_tokens),
        Stage.OUTPUT: product(
            hidden, config.vocab_size, sum(piece.num_logits for piece in step.slices), 1
        ),
    }


def _visible_keys(piece: SequenceSlice) -> int:
    before = piece.context_len - piece.num_tokens
    return sum(range(before + 1, piece.context_len + 1))


def _stages(
    seconds: dict[Stage, float], needed: dict[Stage, Needs], machine: dict[str, float]
) -> dict[str, dict[str, float]]:
    figures = {}
    for stage in Stage:
        need = needed.get(stage, Needs())
        each = {
            "ms": 1e3 * seconds[stage],
            "operations_ms": 1e-6 * need.operations / machine["tile_gflops"],
            "torch_operations_ms": 1e-6 * need.operations / machine["torch_gflops"],
            "bytes_ms": 1e-6 * need.bytes_read / machine["read_gb_per_s"],
        }
        figures[stage.name.lower()] = {key: float(f"{value:.4g}") for key, value in each.items()}
    return figures


def _table(row: dict[str, Any]) -> Table:
    machine = row["machine"]
    table = Table(
        title=f"{row['work']}, {row['threads']} thread(s)",
        caption=f"{machine['tile_gflops']:.0f} GFLOP/s (torch {machine['torch_gflops']:.0f}), "
        f"{machine['read_gb_per_s']:.1f} GB/s",
    )
    for name in ("stage", "ms", "share", "products (torch)", "bytes", "reached", "lost ms"):
        table.add_column(name, justify="left" if name == "stage" else "right")
    total = sum(stage["ms"] for stage in row["stages"].values())
    whole = 0.0
    for name, stage in row["stages"].items():
        bound = max(stage["operations_ms"], stage["bytes_ms"])
        whole += bound
        table.add_row(
            name.replace("_", " "),
            f"{stage['ms']:.2f}",
            f"{stage['ms'] / total:.0%}",
            f"{stage['operations_ms']:.2f} ({stage['torch_operations_ms']:.2f})" if bound else "",
            f"{stage['bytes_ms']:.2f}" if bound else "",
            f"{bound / stage['ms']:.0%}" if bound else "",
            f"{stage['ms'] - bound:.2f}",
        )
    table.add_row("all", f"{total:.2f}", "", "", "", f"{whole / total:.0%}", f"{total - whole:.2f}")
    return table


if __name__ == "__main__":
    run(main)

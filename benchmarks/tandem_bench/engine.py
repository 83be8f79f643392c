"""`tandem bench engine`, as a command of its own: `python -m tandem_bench.engine`.

One engine's model alone, without scheduler and network: tokens a second of prefill, in steps of 512
tokens, and of decode at several batch sizes, by the compiled kernels and by torch. What is compared
takes turns within one run; medians. Beside each figure stands its share of what this machine can:

    prefill   operations a second of the model's products, of torch's best fp32 product in this run
    decode    bytes of weights and KV a second, of what reading memory gives in this run

Nothing else should run on the machine: how long the cores were idle before is told, too.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, run
from cyclopts.validators import Number
from rich.console import Console
from rich.table import Table

from tandem.common.config.engine import EngineConfig
from tandem.common.process.progress import ProgressRow, Waiting
from tandem.errors import TandemError
from tandem_bench.framework import idle_percent, machine, write

MODES: Mapping[str, dict[str, str]] = {
    "native bf16": {"dtype": "bfloat16", "kernels": "native"},
    "native fp32": {"dtype": "float32", "kernels": "native"},
    "native int8": {"dtype": "bfloat16", "kernels": "native", "weights": "int8"},
    "torch bf16": {"dtype": "bfloat16", "kernels": "torch"},
    "torch fp32": {"dtype": "float32", "kernels": "torch"},
}
_QUIET_PERCENT = 90.0  # idle cores, or the run is marked as disturbed
_PRODUCT_SIZE = 1536
_READ_BYTES = 256 << 20


@dataclass
class Row:
    """One mode on one number of threads: seconds of each sample, by what was computed."""

    mode: str
    threads: int
    seconds: dict[str, list[float]]


def main(
    *,
    model: Annotated[str, Parameter(help="Model, as for `tandem up --model`.")] = "smollm2",
    modes: Annotated[
        str,
        Parameter(help=f"Of {', '.join(MODES)}. Default: those this machine is fast at."),
    ] = "",
    threads: Annotated[str, Parameter(help="Numbers of threads, such as 1,2.")] = "1",
    prompts: Annotated[str, Parameter(help="Lengths of the prompts, in tokens.")] = "512,2048",
    batches: Annotated[str, Parameter(help="Numbers of decoding sequences.")] = "1,8,32",
    repeats: Annotated[int, Parameter(help="Samples of each row.", validator=Number(gte=1))] = 5,
    output: Annotated[Path | None, Parameter(help="JSON file to write.")] = None,
) -> None:
    """Measure the model's steps: compiled kernels beside torch."""
    wanted = modes.split(",") if modes else _fast_modes()
    if unknown := set(wanted) - MODES.keys():
        print(f"no such mode: {', '.join(sorted(unknown))}", file=sys.stderr)
        sys.exit(2)
    console = Console()
    try:
        with Waiting(ProgressRow("machine", "is watched"), redraws_per_s=0) as waiting:
            idle = idle_percent(2.0)
            results = measure(
                model,
                modes=wanted,
                threads=[int(word) for word in threads.split(",")],
                prompts=[int(word) for word in prompts.split(",")],
                batches=[int(word) for word in batches.split(",")],
                repeats=repeats,
                tell=waiting.show,
            )
    except TandemError as error:
        console.print(f"tandem bench: {error.message}")
        sys.exit(1)
    results["idle_percent_before"] = round(idle, 1)
    for count in results["machine"]["limits"]:
        console.print(_table(results, int(count)))
    if idle < _QUIET_PERCENT:
        console.print(f"[red]the machine was not quiet: {idle:.0f}% idle before[/red]")
    if output is not None:
        write(output, results)
        console.print(f"written to {output}")


def _fast_modes() -> list[str]:
    """All, but torch in bf16 only where the hardware multiplies it: else it takes minutes."""
    import torch

    from tandem.engine.executor.runner import has_bfloat16

    has = has_bfloat16(torch.device("cpu"))
    return [mode for mode in MODES if has or mode != "torch bf16"]


def measure(
    model: str,
    *,
    modes: list[str],
    threads: list[int],
    prompts: list[int],
    batches: list[int],
    repeats: int,
    tell: Callable[[ProgressRow], None],
) -> dict[str, Any]:
    """Everything of the JSON file but the idle time. Raises TandemError."""
    from tandem_bench.engine_steps import resolve_dense

    num_works = len(set(prompts)) + len(set(batches))
    num_samples = len(threads) * len(modes) * num_works * (1 + repeats)
    num_timed = 0

    def timed(row: Row, name: str, work: Callable[[], float]) -> float:
        nonlocal num_timed
        note = f"{row.mode}, {row.threads} thread(s): {name}"
        tell(ProgressRow("samples", note, num_timed, num_samples))
        num_timed += 1
        return work()

    folder = resolve_dense(model)
    rows = []
    for count in threads:
        tell(
            ProgressRow(
                "samples", f"the model is loaded for {count} thread(s)", num_timed, num_samples
            )
        )
        runs = {mode: dict(_work(folder, mode, count, prompts, batches)) for mode in modes}
        group = [Row(mode, count, {name: [] for name in runs[mode]}) for mode in modes]
        for row in group:  # once, not counted: pages, packing, caches
            for name, work in runs[row.mode].items():
                timed(row, name, work)
        for name in group[0].seconds:
            for _ in range(repeats):
                for row in group:
                    row.seconds[name].append(timed(row, name, runs[row.mode][name]))
        rows += group
    tell(ProgressRow("machine", "its own products and reads"))
    config = folder.config
    return {
        "model": model,
        "machine": {
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "processor": machine()["cpu"],
            "limits": {count: limits(count) for count in threads},
        },
        "repeats": repeats,
        "parameters": {"products": _product_weights(config), "output": _output_weights(config)},
        "rows": [
            {
                "mode": row.mode,
                "threads": row.threads,
                **{name: _figures(name, taken, row, config) for name, taken in row.seconds.items()},
            }
            for row in rows
        ],
    }


def limits(threads: int) -> dict[str, float]:
    """Measures the machine's limits with so many threads: fp32 products and reading, the best of
    10."""
    import torch

    torch.set_num_threads(threads)
    a = torch.randn(_PRODUCT_SIZE, _PRODUCT_SIZE)
    memory = torch.ones(_READ_BYTES // 4)
    product_s = min(_timed(lambda: torch.mm(a, a)) for _ in range(10))
    read_s = min(_timed(memory.sum) for _ in range(10))
    return {
        "gflops": round(2 * _PRODUCT_SIZE**3 / product_s / 1e9, 1),
        "read_gb_per_s": round(_READ_BYTES / read_s / 1e9, 1),
    }


def _work(
    folder: Any, mode: str, threads: int, prompts: list[int], batches: list[int]
) -> Iterator[tuple[str, Callable[[], float]]]:
    """Name of what is computed, and what computes it and answers the seconds."""
    from tandem.engine.executor.runner import ModelRunner
    from tandem_bench.engine_steps import blocks_needed, decode_step, prefill_steps

    config = EngineConfig(model="", device="cpu", num_threads=threads, **MODES[mode])  # type: ignore[arg-type]
    runner = ModelRunner(folder, config)
    block_size = config.block_size
    runner.allocate(blocks_needed(block_size, prompt=max(prompts), batch=max(batches)))
    work = {f"prefill {count}": prefill_steps(count, block_size) for count in prompts}
    work |= {f"decode {count}": [decode_step(count, block_size)] for count in batches}
    for name, steps in work.items():
        yield name, partial(_on, threads, partial(_run, runner, steps))


def _run(runner: Any, steps: list[Any]) -> None:
    for step in steps:
        runner.forward(step)


def _on(threads: int, work: Callable[[], object]) -> float:
    """Seconds it takes; the number of threads is torch's and so every runner's of this process."""
    import torch

    torch.set_num_threads(threads)
    return _timed(work)


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _figures(name: str, taken: list[float], row: Row, config: Any) -> dict[str, float]:
    kind, _, count = name.partition(" ")
    median = statistics.median(taken)
    tokens = int(count)
    figures = {"tokens_per_s": tokens / median, "median_s": median, "min_s": min(taken)}
    if kind == "prefill":
        figures["gflops"] = 2 * _product_weights(config) * tokens / median / 1e9
    else:
        bytes_each = {"bf16": 2, "fp32": 4, "int8": 1}[row.mode.split()[1]]
        weights = (_product_weights(config) + _output_weights(config)) * bytes_each
        figures["read_gb_per_s"] = weights / median / 1e9
    return {key: float(f"{value:.4g}") for key, value in figures.items()}


def _product_weights(config: Any) -> int:
    """Returns the number of weights in the matrices of all layers."""
    heads = config.num_attention_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    return int(config.num_layers * hidden * (2 * heads + 2 * kv + 3 * inner))


def _output_weights(config: Any) -> int:
    return int(config.vocab_size * config.hidden_size)


def _table(results: dict[str, Any], threads: int) -> Table:
    limit = results["machine"]["limits"][threads]
    rows = [row for row in results["rows"] if row["threads"] == threads]
    names = [name for name in rows[0] if name not in ("mode", "threads")]
    table = Table(
        title=f"{threads} thread(s): tokens/s",
        caption=f"in brackets the share of {limit['gflops']:.0f} GFLOP/s (prefill) and of "
        f"{limit['read_gb_per_s']:.1f} GB/s (decode, weights only)",
    )
    table.add_column("mode")
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        cells = [row["mode"]]
        for name in names:
            figures = row[name]
            key = "gflops" if name.startswith("prefill") else "read_gb_per_s"
            cells.append(f"{figures['tokens_per_s']:,.0f} ({figures[key] / limit[key]:.0%})")
        table.add_row(*cells)
    return table


if __name__ == "__main__":
    run(main)

"""`tandem bench transfer`, as a command of its own: `python -m tandem_bench.transfer`.

What Tandem's two transports make of what the machine gives, from one block to a thousand:
nixl_bench.py and grpc_bench.py say what is timed. Methods of one transport are compared in turn
within a row; medians. Nothing else should run on the machine.
"""

from __future__ import annotations

import asyncio
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, run
from cyclopts.validators import Number
from rich.console import Console

from tandem.common.process.progress import ProgressRow, Waiting
from tandem.errors import Incompatible, TandemError
from tandem.transfer.nixl.agent import load_nixl
from tandem_bench import table
from tandem_bench.framework import write
from tandem_bench.sizes import BLOCKS, MODELS, POOL_BYTES_MAX, Plan, plan

GOALS = {"from_blocks": 64, "nixl": 0.90, "grpc": 0.85}


def main(
    *,
    blocks: Annotated[str, Parameter(help="Blocks of each row.")] = ",".join(map(str, BLOCKS)),
    repeats: Annotated[
        int, Parameter(help="Samples of a row; small rows get more.", validator=Number(gte=1))
    ] = 5,
    models: Annotated[str, Parameter(help="Models to take block sizes of.")] = ",".join(MODELS),
    pool_bytes: Annotated[int, Parameter(help="Bytes of each pool, at most.")] = POOL_BYTES_MAX,
    idle: Annotated[float, Parameter(help="Seconds to watch idle agents for.")] = 3.0,
    output: Annotated[Path | None, Parameter(help="JSON file to write.")] = None,
) -> None:
    """Measure NIXL and gRPC through Tandem against what they do raw."""
    try:
        rows = tuple(int(word) for word in blocks.split(","))
        if min(rows) < 1:
            raise ValueError("a row has at least one block")
        unknown = set(models.split(",")) - set(MODELS)
        if unknown:
            raise ValueError(f"no such model: {', '.join(sorted(unknown))}")
        plans = [plan(model, rows, pool_bytes) for model in models.split(",")]
    except ValueError as error:
        print(str(error), file=sys.stderr)
        sys.exit(2)
    console = Console(width=None if Console().is_terminal else 130)
    try:
        with Waiting(ProgressRow("transfers", "NIXL is loaded"), redraws_per_s=0) as waiting:
            tell = _Rows(waiting, console, 2 * sum(len(each.blocks) for each in plans)).tell
            results = asyncio.run(measure(plans, repeats=repeats, idle_s=idle, tell=tell))
    except TandemError as error:
        console.print(f"tandem bench: {error.message}")
        sys.exit(1)
    results["pool_bytes_max"] = pool_bytes
    table.show(results, console)
    if output is not None:
        write(output, results)
        console.print(f"written to {output}")


class _Rows:
    """Tells of each row when it begins: a line, and on a terminal a bar."""

    def __init__(self, waiting: Waiting, console: Console, total: int) -> None:
        self._waiting = waiting
        self._console = console
        self._total = total
        self._num_begun = 0

    def tell(self, row: str) -> None:
        with self._waiting.hidden():
            self._console.print(row, style="dim")
        self._waiting.show(ProgressRow("transfers", row, self._num_begun, self._total))
        self._num_begun += 1


async def measure(
    plans: list[Plan], *, repeats: int, idle_s: float, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Everything of the JSON file but the pool's bound. Raises TandemError."""
    # Importing NIXL and torch takes seconds: wrong options are told before.
    from tandem_bench.grpc_bench import RAW_MESSAGE_BYTES

    try:
        load_nixl()
    except Incompatible as error:
        raise Incompatible(f"{error.message} (pip install 'tandem-llm[bench]')") from error
    load_average = os.getloadavg()[0]
    models = [await _measure_model(each, repeats, idle_s, tell) for each in plans]
    return {
        "machine": {
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "load_average_before": round(load_average, 2),
        },
        "ucx_tls": os.environ.get("UCX_TLS", "default"),
        "raw_grpc_message_bytes": RAW_MESSAGE_BYTES,
        "repeats": repeats,
        "goals": GOALS,
        "models": models,
    }


async def _measure_model(
    plan: Plan, repeats: int, idle_s: float, tell: Callable[[str], None]
) -> dict[str, Any]:
    rows: dict[int, dict[str, Any]] = {
        n: {"blocks": n, "bytes": n * plan.layout.block_bytes} for n in plan.blocks
    }
    idle_cpu_percent = await _measure_nixl(plan, rows, repeats, idle_s, tell)
    await _measure_grpc(plan, rows, repeats, tell)
    for row in rows.values():
        for transport in ("nixl", "grpc"):
            ratio = row[f"{transport}_raw"]["median_s"] / row[transport]["median_s"]
            row[f"{transport}_ratio"] = round(ratio, 3)
    return {
        "model": plan.model,
        "block_bytes": plan.layout.block_bytes,
        "cut": list(plan.cut),
        "transports": ["nixl", "grpc"],
        "idle_cpu_percent": round(idle_cpu_percent, 3),
        "rows": list(rows.values()),
    }


async def _measure_nixl(
    plan: Plan,
    rows: dict[int, dict[str, Any]],
    repeats: int,
    idle_s: float,
    tell: Callable[[str], None],
) -> float:
    from tandem_bench.nixl_bench import NixlBench

    bench = NixlBench(plan)
    try:
        for num_blocks, row in rows.items():
            tell(f"{plan.model}: NIXL, {num_blocks} blocks")
            row.update(await bench.row(num_blocks, repeats))
        return await bench.idle_cpu_percent(idle_s)
    finally:
        bench.close()


async def _measure_grpc(
    plan: Plan, rows: dict[int, dict[str, Any]], repeats: int, tell: Callable[[str], None]
) -> None:
    from tandem_bench.grpc_bench import GrpcBench

    bench = GrpcBench(plan)
    await bench.start()
    try:
        for num_blocks, row in rows.items():
            tell(f"{plan.model}: gRPC, {num_blocks} blocks")
            row.update(await bench.row(num_blocks, repeats))
    finally:
        await bench.close()


if __name__ == "__main__":
    run(main)

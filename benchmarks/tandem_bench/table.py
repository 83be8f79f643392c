"""The bench's figures as tables for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

_NAMES = {"nixl": "NIXL", "grpc": "gRPC"}
_LIMITS = {"nixl": ("nixl_blocks", "of its blocks"), "grpc": ("grpc_raw_memory", "of memory")}


def show(results: dict[str, Any], console: Console) -> None:
    """Prints one table for each model and the lines that belong to none."""
    for model in results["models"]:
        console.print(_table(model))
        if model["cut"]:
            cut = ", ".join(map(str, model["cut"]))
            console.print(f"cut, over {results['pool_bytes_max'] >> 20} MiB a side: {cut} blocks")
        idle = model["idle_cpu_percent"]
        console.print(f"both NIXL processes idle: {idle:.2f}% of a core\n")
    goals = results["goals"]
    console.print(
        f"goals from {goals['from_blocks']} blocks up: NIXL {goals['nixl']:.0%} of raw, "
        f"gRPC {goals['grpc']:.0%} of raw"
    )


def _table(model: dict[str, Any]) -> Table:
    table = Table(
        title=f"{model['model']}: {model['block_bytes'] >> 10} KiB a block",
        caption="GB/s: through Tandem / raw = ratio; in brackets CPU seconds a GB, all processes;\n"
        "of its blocks: NIXL's own read of the same scattered blocks = 100%;\n"
        "of memory: raw gRPC of bytes that come from memory, too = 100%",
    )
    table.add_column("blocks", justify="right")
    table.add_column("MiB", justify="right")
    table.add_column("memcpy GB/s", justify="right")
    for transport in model["transports"]:
        table.add_column(_NAMES[transport], justify="right")
        table.add_column(_LIMITS[transport][1], justify="right")
        table.add_column("median", justify="right")
    for row in model["rows"]:
        cells = [str(row["blocks"]), f"{row['bytes'] / 2**20:.1f}"]
        memcpy = row.get("memcpy")
        cells.append(f"{memcpy['gb_per_s']:.1f}" if memcpy else "")
        for transport in model["transports"]:
            ours, raw = row[transport], row[f"{transport}_raw"]
            cells.append(
                f"{ours['gb_per_s']:.2f} / {raw['gb_per_s']:.2f} = {row[f'{transport}_ratio']:.0%}"
                f" [{ours['cpu_s_per_gb']:.2f} / {raw['cpu_s_per_gb']:.2f}]"
            )
            limit = row[_LIMITS[transport][0]]
            cells.append(f"{limit['median_s'] / ours['median_s']:.0%}")
            cells.append(_duration(ours["median_s"]))
        table.add_row(*cells)
    return table


def _duration(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"

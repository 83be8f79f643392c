"""`tandem index verify`: asks a router to compare the prefix tree with what the workers hold."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from tandem.cluster.operate import PIPE_COLUMNS, ask

_SAMPLE_DEADLINE_S = 60.0
_ALL_DEADLINE_S = 900.0


def verify_index(url: str, *, everything: bool) -> bool:
    """Prints what was found of each worker; whether all is as it should be. Raises OperateError."""
    deadline_s = _ALL_DEADLINE_S if everything else _SAMPLE_DEADLINE_S
    answer = ask(
        url,
        "POST",
        {"all": everything},
        path="/v1/cluster/index/verify",
        deadline_s=deadline_s,
    )
    workers: dict[str, dict[str, Any]] = answer["workers"]
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    console.print(_table(workers))
    return all(worker["ok"] for worker in workers.values())


def _table(workers: dict[str, dict[str, Any]]) -> Table:
    table = Table("worker", box=None, pad_edge=False)
    for name in ("checked", "missing", "stale"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for worker_id, worker in sorted(workers.items()):
        numbers = [f"{worker[name]:,}" for name in ("checked", "missing", "stale")]
        if worker["error"]:
            numbers, verdict = ["-"] * 3, f"[red]{worker['error']}[/]"
        elif not worker["in_tree"]:
            verdict = "[red]it has no log in the tree[/]"
        else:
            verdict = "[green]ok[/]" if worker["ok"] else "[red]differs[/]"
        table.add_row(worker_id, *numbers, verdict)
    return table

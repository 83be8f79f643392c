"""`tandem ps` lists the clusters of this user on this machine."""

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from tandem.cluster.logs.run_logs import Addresses, running
from tandem.cluster.operate import call_router, console
from tandem.errors import OperateError

_DEADLINE_S = 2.0


def show_clusters() -> None:
    """Prints a row for each cluster that runs, the oldest first."""
    columns = ("model", "state", "workers", "URL", "admin URL", "up for", "pid")
    table = Table(*columns, box=None, pad_edge=False)
    for addresses in running():
        state = _state(addresses)
        workers = state.get("workers", ())
        roles = Counter(w["role"] for w in workers)
        shown = [f"{roles[role]} {role}" for role in ("prefill", "decode")]
        shown += [f"{roles['encode']} encode"] if roles["encode"] else []
        table.add_row(
            str(state.get("model") or "?"),
            _word(state),
            ", ".join(shown) if state else "?",
            addresses.http,
            addresses.admin,
            _age(time.time() - addresses.started_at) if addresses.started_at else "?",
            str(addresses.pid or "?"),
        )
    screen = console()
    if table.row_count:
        screen.print(table)
    else:
        screen.print("no cluster is running here; `tandem up` starts one")


def _state(addresses: Addresses) -> Mapping[str, Any]:
    try:
        state = call_router(addresses.admin, "GET", deadline_s=_DEADLINE_S)
    except OperateError:
        return {}
    return state if isinstance(state, dict) else {}


def _word(state: Mapping[str, Any]) -> str:
    if not state:
        return "no router answers"
    return "ready" if state["router"]["ready"] else "not ready"


def _age(seconds: float) -> str:
    """Returns a duration in its largest unit, such as 3 min."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"

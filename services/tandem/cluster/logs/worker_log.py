"""`tandem logs` prints the log of one process.

If the process runs on this machine, its log file is read. A router fetches the log of a process on
another machine. If no router answers, the file in the cluster's last run on this machine is
printed. A log of another cluster is never printed.
"""

import os
import socket
import sys
import time
import urllib.parse
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.table import Table

from tandem.cluster.logs.run_logs import (
    DEFAULT_ADMIN_URL,
    find_address,
    find_log,
    find_run,
    log_names,
    show_log,
)
from tandem.cluster.operate import call_router, console
from tandem.common.process.progress import ProgressRow, Waiting
from tandem.errors import OperateError

_PIECE_DEADLINE_S = 15.0  # longer than the 10 s that the router waits for the worker
_POLL_S = 0.5


def show_worker_log(url: str, process_id: str, *, follow: bool) -> None:
    """Prints a log. With `follow`, waits for further text and prints it until an interrupt. `url`
    is the admin address of a router; empty: that of the cluster on this machine. Raises
    OperateError."""
    place = url or find_address("admin", DEFAULT_ADMIN_URL)
    with Waiting(ProgressRow(process_id, "is looked up")):
        state, why_unknown = _state(place)
    run = _run(state, url, place)
    local = find_log(run, process_id)
    worker = _worker(state, process_id)
    is_own_router = state.get("router", {}).get("id") == process_id
    if local is not None and (worker is None or _writes(worker, local)):
        if host := _other_host(state, process_id):
            _note(
                f"{process_id} last ran on {host}; this is its log from an earlier run on this "
                "machine"
            )
        show_log(local, follow=follow)
    elif worker is None and not is_own_router:
        raise OperateError(
            _where_log_is(state, process_id) or f"{_no_log(run, process_id)}; {why_unknown}"
        )
    else:
        _show_remote(place, process_id, local, follow=follow)


def show_names(url: str) -> None:
    """Prints the names of the cluster's processes whose logs `show_worker_log` finds, and where
    these logs are. Raises OperateError if there are none."""
    place = url or find_address("admin", DEFAULT_ADMIN_URL)
    state, why_unknown = _state(place)
    where = dict.fromkeys(log_names(_run(state, url, place)), "this machine")
    for worker in state.get("workers", ()):
        where.setdefault(worker["worker_id"], worker["host"])
    if not where:
        why = f"the router at {place} knows no workers" if state else why_unknown
        raise OperateError(f"this machine has no logs of a cluster; {why}")
    table = Table("log", "where", box=None, pad_edge=False)
    for name in sorted(where):
        table.add_row(name, where[name])
    console().print(table)


def _run(state: Mapping[str, Any], url: str, place: str) -> Path | None:
    """Finds the folder of the cluster's run on this machine; None if there is none.

    If a router answered, the folder is found by the cluster's id. Otherwise it is the last run with
    the admin address `place`. If there is none and `url` is empty, it is the last run of all, for
    example one that ended before it was ready.
    """
    if cluster_id := state.get("cluster_id"):
        return find_run(cluster_id=cluster_id)
    found = find_run(admin_url=place.rstrip("/"))
    return found if found is not None or url else find_run()


def _show_remote(url: str, process_id: str, local: Path | None, *, follow: bool) -> None:
    """Prints the log that a router fetches from the process. If this fails, prints the file
    `local`."""
    path = f"/v1/cluster/workers/{urllib.parse.quote(process_id, safe='')}/log"
    try:
        with Waiting(ProgressRow(process_id, "is asked for its log")):
            piece = call_router(url, "GET", path=path, deadline_s=_PIECE_DEADLINE_S, keep="\n\t")
    except OperateError as error:
        if local is None:
            raise
        _note(f"{error.message}; this is the last log of {process_id} on this machine")
        show_log(local, follow=follow)
        return
    with suppress(KeyboardInterrupt, BrokenPipeError):
        _show_pieces(url, path, piece, follow=follow)


def _note(text: str) -> None:
    print(f"tandem: {text}", file=sys.stderr)


def _state(url: str) -> tuple[Mapping[str, Any], str]:
    """Fetches the cluster's state from a router. If no router answers, the state is empty. Also
    returns the message to print for a worker that is not in the state."""
    try:
        state = call_router(url, "GET")
    except OperateError as error:
        return {}, error.message
    if isinstance(state, dict) and "workers" in state:
        return state, f"the router at {url} knows no worker with this id"
    return {}, f"the program that answers at {url} is not a router"


def _no_log(run: Path | None, process_id: str) -> str:
    names = ", ".join(log_names(run)) or "none"
    return (
        f"this machine has no log of {process_id[:80]!r}; it has these logs of the cluster: "
        f"{names}. On Kubernetes, `kubectl logs POD` shows the log of a pod"
    )


def _worker(state: Mapping[str, Any], worker_id: str) -> Mapping[str, Any] | None:
    return next((w for w in state.get("workers", ()) if w["worker_id"] == worker_id), None)


def _row(state: Mapping[str, Any], worker_id: str) -> Mapping[str, str]:
    known = state.get("known_workers", ())
    return next((row for row in known if row["worker_id"] == worker_id), {})


def _writes(worker: Mapping[str, Any], log: Path) -> bool:
    """Says whether the worker's process is on this machine and writes to this file."""
    with suppress(OSError):
        return os.path.samefile(f"/proc/{worker['pid']}/fd/2", log)
    return False


def _other_host(state: Mapping[str, Any], worker_id: str) -> str:
    """Returns the host on which a worker last ran that has no record in Redis now. Returns "" if
    the worker has a record, or the host is this machine or unknown."""
    host = str(_row(state, worker_id).get("host", ""))
    is_local = _worker(state, worker_id) or host.partition(" (")[0] in ("", socket.gethostname())
    return "" if is_local else host


def _where_log_is(state: Mapping[str, Any], process_id: str) -> str:
    """Explains where to find the log of a process that has no record in Redis now. Returns "" if
    the process is unknown."""
    agents = [
        agent
        for pool in state.get("pools", {}).values()
        for agent in pool.get("agents", ())
        if agent["id"] == process_id
    ]
    row = _row(state, process_id)
    if not agents and not row:
        return ""
    host = row.get("host") or next((a["host"] for a in agents if a.get("host")), "")
    described = ": ".join(filter(None, (row.get("state"), row.get("note")))) or agents[0]["state"]
    where = f"on its host {host}" if host else "on its own host"
    return f"{process_id} is {described}. Its log is {where}: run `tandem logs {process_id}` there"


def _show_pieces(url: str, path: str, piece: Mapping[str, str], *, follow: bool) -> None:
    """Prints `piece`, a part of a log, and the parts after it, which the router fetches one by one.
    With `follow`, waits for further parts until an interrupt. Raises OperateError."""
    is_away = False
    while piece["text"] or follow:
        sys.stdout.write(piece["text"])
        sys.stdout.flush()
        if not piece["text"]:
            time.sleep(_POLL_S)
        place = f"{path}?after={piece['after']}"
        try:
            piece = call_router(url, "GET", path=place, deadline_s=_PIECE_DEADLINE_S, keep="\n\t")
            is_away = False
        except OperateError as error:
            if not follow:
                raise
            if not is_away:
                _note(f"{error.message}. New lines follow when it answers again")
            is_away = True
            piece = {**piece, "text": ""}

"""The operators' commands, such as `tandem status` and `tandem drain`. Each one calls a router."""

import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.cluster.tables import (
    audit_tables,
    index_table,
    placed_whys,
    pools_table,
    waiting_pools,
    worker_tables,
)
from tandem.common.config.cluster import API_KEY_FILE_VARIABLE, API_KEY_VARIABLE
from tandem.common.pool_sizes import POOL_SIZE_MAX
from tandem.common.printable import printable, printable_json
from tandem.common.process.progress import ProgressRow, Waiting
from tandem.errors import OperateError

_REPLY_DEADLINE_S = 5.0
_SET_ROLE_DEADLINE_S = 15.0
_WATCH_INTERVAL_S = 2.0
_SET_SIZES_DEADLINE_S = 75.0  # longer than for other calls: Ray may still be starting
_POLL_INTERVAL_S = 0.25
_MEMORY_LOW_SHARE = 0.05
# seconds after the deadline of a drain in which the worker's process ends and its record expires
_END_MARGIN_S = 15.0
# longest wait if the command has no deadline: the worker then uses its own, which is unknown here
_OWN_DEADLINE_MAX_S = 3600.0
_PIPE_COLUMNS = 200
_RECENT_S = 300.0
_RECENT_MAX = 8  # `tandem status` shows at most this many events
_SAMPLE_DEADLINE_S = 60.0
_ALL_DEADLINE_S = 900.0
# stages of a request after its first token
_LATER_STAGES = ("transfer_exposed", "first_decode", "move")


def watch_status(url: str) -> None:
    """Prints pools and workers again and again, each time on an empty screen, until Ctrl-C. Raises
    OperateError only if the first call fails."""
    screen = console()
    show_status(url)
    with suppress(KeyboardInterrupt):
        while True:
            time.sleep(_WATCH_INTERVAL_S)
            screen.clear()
            try:
                show_status(url)
            except OperateError as error:
                screen.print(error.message, markup=False)


def show_status(url: str, *, as_json: bool = False) -> None:
    """Prints pools and workers, or the router's whole state as JSON. Raises OperateError."""
    state = call_with_progress(url, "GET")
    if not isinstance(state, dict) or "router" not in state:
        raise OperateError(
            f"the program that answers at {url} is not a router of Tandem; name a router's "
            "admin address with --url"
        )
    if as_json:
        print(json.dumps(state, indent=2))
        return
    screen = console()
    router = state["router"]
    ready = ("ready", "green") if router["ready"] else ("not ready", "yellow")
    models = state.get("models", [state])  # a router of one model sends no list
    names = " and ".join(each["model"] or "a router" for each in models)
    screen.print(Text.assemble(f"{names} at {url}: ", ready, f"; redis {state['redis']}"))
    for each in models:
        of = f"{each['model']}: " if len(models) > 1 else ""
        if "headline" in each:  # older routers send none
            screen.print(f"{of}{each['headline']}")
    screen.print()
    screen.print(pools_table(state["pools"]))
    for reason in (*waiting_pools(state), *placed_whys(state["pools"])):
        screen.print(reason)
    for each in models:
        of = f" of {each['model']}" if len(models) > 1 else ""
        autoscale = each.get("autoscale", {})
        for decision in autoscale.get("decisions", ()):
            screen.print(f"autoscale {autoscale['mode']}{of}: {decision['why']}")
    screen.print()
    for part in worker_tables(state["workers"], state.get("known_workers", ()), screen):
        screen.print(part)
    for warning in memory_warnings(state["workers"]):
        screen.print(warning, style="yellow")
    if state["redis"] == "ok":
        _show_recent_events(url, screen)


def _show_recent_events(url: str, screen: Console) -> None:
    """Prints the events of the last _RECENT_S seconds."""
    with suppress(OperateError):
        path = f"/v1/cluster/events?limit={_RECENT_MAX}"
        events = call_with_progress(url, "GET", path=path)["events"]
        recent = [e for e in events if time.time() - e["at"] < _RECENT_S]
        if recent:
            screen.print("\nrecent events:")
        for event in reversed(recent):
            ago = f"{max(0.0, time.time() - event['at']):.0f} s ago"
            about = f" {event['about']}" if event["about"] else ""
            screen.print(f"  {ago}: {event['kind']}{about}: {event['text']}")


def scale_pools(url: str, sizes: Sequence[str], *, deadline_s: float) -> None:
    """Sets pool sizes given as POOL=SIZE and waits until they are reached. Raises OperateError."""
    wanted = parse_sizes(sizes)
    call_with_progress(url, "POST", wanted, deadline_s=_SET_SIZES_DEADLINE_S)
    give_up_at = time.monotonic() + deadline_s
    state = initial = call_with_progress(url, "GET")
    with Waiting() as waiting:
        while missing := differences(state["pools"], wanted):
            if time.monotonic() > give_up_at:
                raise OperateError(
                    f"the pools did not reach the requested sizes in {deadline_s:g} s: "
                    f"{'; '.join(missing)}. The cluster still works towards these sizes; `tandem "
                    "status` shows the progress, and on Kubernetes `kubectl get pods` shows why a "
                    "pod waits"
                )
            waiting.show(*scale_steps(initial, state, wanted))
            time.sleep(_POLL_INTERVAL_S)
            state = call_router(url, "GET")
    print(" ".join(f"{pool}={size}" for pool, size in wanted.items()))


def set_role(url: str, worker_id: str, role: str) -> None:
    """Moves a worker to the pool of this role. If `role` is empty, moves it to the other pool.
    Raises OperateError."""
    path = _path(worker_id, "role")
    body = {"role": role} if role else {}
    with Waiting(ProgressRow(worker_id, "changes its pool")):
        done = call_router(url, "POST", body, path=path, deadline_s=_SET_ROLE_DEADLINE_S)
    print(f"{worker_id} is now in the {done['role']} pool (this took {done['seen_s']:.2f} s)")


def drain_worker(url: str, worker_id: str, *, deadline_s: float, force: bool = False) -> None:
    """Drains a worker and waits until its process has ended. Raises OperateError."""
    initial = state = call_with_progress(url, "GET")
    process = _process(state, worker_id)
    body = {"deadline_s": deadline_s, **({"force": True} if force else {})}
    call_with_progress(url, "POST", body, path=_path(worker_id, "drain"))
    waits_s = (deadline_s or _OWN_DEADLINE_MAX_S) + _END_MARGIN_S
    give_up_at = time.monotonic() + waits_s
    with Waiting() as waiting:
        while _process(state, worker_id) == process:
            if time.monotonic() > give_up_at:
                raise OperateError(
                    f"{worker_id} has not ended after {waits_s:g} s; `tandem logs {worker_id}` "
                    "shows why"
                )
            waiting.show(drain_step(initial, state, worker_id))
            time.sleep(_POLL_INTERVAL_S)
            state = call_router(url, "GET")
    print(f"{worker_id} is drained and has ended")


def reset_prefix_cache(url: str, worker_id: str) -> None:
    """Drops the cached blocks of one worker, or of all workers if `worker_id` is empty. Prints the
    number of dropped blocks of each worker. Raises OperateError."""
    body = {"worker_id": worker_id} if worker_id else {}
    with Waiting(ProgressRow(worker_id or "all workers", "drop their cached blocks")):
        answer = call_router(
            url, "POST", body, path="/reset_prefix_cache", deadline_s=_SET_ROLE_DEADLINE_S
        )
    for name, num_blocks in answer["dropped_blocks"].items():
        print(f"{name}: {num_blocks:,} blocks dropped")


def verify_index(url: str, *, everything: bool) -> bool:
    """Compares each worker's blocks with the prefix tree and prints the result for each worker.
    Returns True if the prefix tree is correct for all workers. Raises OperateError."""
    deadline_s = _ALL_DEADLINE_S if everything else _SAMPLE_DEADLINE_S
    path = "/v1/cluster/index/verify"
    with Waiting(ProgressRow("all workers", "their blocks are compared with the prefix tree")):
        answer = call_router(url, "POST", {"all": everything}, path=path, deadline_s=deadline_s)
    workers: dict[str, dict[str, Any]] = answer["workers"]
    console().print(index_table(workers))
    return all(worker["ok"] for worker in workers.values())


def show_why(url: str, request_id: str) -> None:
    """Prints the stages of a request and the reason for its placement. Raises OperateError."""
    answer = call_with_progress(
        url, "GET", path=f"/v1/requests/{urllib.parse.quote(request_id, safe='')}"
    )
    # a request with several prompts or choices has several records
    for record in answer.get("data", [answer]):
        _show_record(record)


def _show_record(record: Mapping[str, Any]) -> None:
    screen = console()
    ttft_ms = record["ttft_ms"]
    outcome = f"{record['outcome']}: {record['error']}" if record["error"] else record["outcome"]
    screen.print(f"{record['id']} ({record['kind']}): {outcome}")
    stages = record["stages_ms"]
    before = [name for name in stages if name not in _LATER_STAGES]
    table = Table("stage", box=None, pad_edge=False)
    for column in ("ms", "of TTFT"):
        table.add_column(column, justify="right")
    for name in before:
        share = f"{stages[name] / ttft_ms:.0%}" if ttft_ms else "-"
        table.add_row(name, f"{stages[name]:.1f}", share)
    if ttft_ms is not None:
        total = sum(stages[name] for name in before)
        table.add_row("time to first token", f"{ttft_ms:.1f}", f"{total / ttft_ms:.0%}")
    for name in [name for name in _LATER_STAGES if name in stages]:
        table.add_row(f"{name}, later", f"{stages[name]:.1f}", "")
    screen.print(table)
    if record.get("session") or record.get("priority"):
        named = f" of session {record['session']}" if record["session"] else ""
        screen.print(f"priority {record['priority']}{named}", markup=False)
    if waited_ms := record["shared_wait_ms"]:
        screen.print(
            f"{waited_ms:.1f} ms of the queue time: the request waited for KV blocks that other "
            "requests computed"
        )
    if tokens := record.get("tokens_ahead"):
        screen.print(f"{tokens:,} prompt tokens of earlier requests were to compute before its own")
    usage = record["usage"]
    cached = f"{usage['cached_tokens']} of {usage['prompt_tokens']} prompt tokens were cached"
    if by_tier := usage.get("cached_tokens_by_tier"):
        cached += f" ({', '.join(f'{tier} {num}' for tier, num in by_tier.items())})"
    screen.print(f"placed: {record['placement'] or 'no worker was chosen'}; {cached}")
    if sentence := record.get("placement_sentence"):
        screen.print(sentence)
    if usage.get("budget_restarted"):
        screen.print(
            "the KV budget was restarted: another worker computed the KV again, and chose again "
            "which blocks to keep"
        )
    pulled = "no KV blocks"
    if record["blocks_pulled"]:
        pulled = f"{record['blocks_pulled']} KV blocks over {record['transport'] or 'no transport'}"
    decode = record["decode_worker"]
    if not decode:
        screen.print("no worker computed this request")
    elif prefill := record["prefill_worker"]:
        screen.print(f"prefilled by {prefill}, decoded by {decode}")
    else:
        screen.print(f"prefilled and decoded by {decode}")
    if kept := record.get("kept"):
        screen.print(_kept_text(kept))
    if proposed := record.get("tokens_proposed"):
        screen.print(
            f"speculated: {record['tokens_accepted']:,} of {proposed:,} proposed tokens were "
            f"accepted, which saved about {record['speculation_saved_ms']:.0f} ms"
        )
    screen.print(
        f"pulled {pulled}; moved to another worker {record['moves']} times; "
        f"{record['workers_lost']} workers of this request failed"
    )


def _kept_text(kept: Mapping[str, Any]) -> str:
    text = (
        f"kept: {kept['tokens']:.0f} of {kept['tokens_asked']:.0f} requested tokens are evicted "
        "last"
    )
    text += f" on {kept['worker']} for {kept['seconds']:g} s"
    return f"{text}; {kept['why_not']}" if kept["why_not"] else text


def show_events(url: str, limit: int) -> None:
    """Prints the last events, newest last. Raises OperateError."""
    table = Table("time (UTC)", "event", "about", "what", box=None, pad_edge=False)
    answer = call_with_progress(url, "GET", path=f"/v1/cluster/events?limit={limit}")
    for event in reversed(answer["events"]):
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(event["at"]))
        table.add_row(at, event["kind"], event["about"] or "-", event["text"])
    console().print(table)


def show_audit(url: str, limit: int) -> None:
    """Prints the last changes and refused calls, newest last. Raises OperateError."""
    entries = call_with_progress(url, "GET", path=f"/v1/cluster/audit?limit={limit}")["entries"]
    screen = console()
    for part in audit_tables(entries, screen):
        screen.print(part)


def console() -> Console:
    """Creates a console that prints text literally, without rich's markup and emoji codes. If
    stdout is a file or a pipe, it is _PIPE_COLUMNS wide, so that table rows are not wrapped."""
    width = None if sys.stdout.isatty() else _PIPE_COLUMNS
    return Console(highlight=False, markup=False, emoji=False, width=width)


def _path(worker_id: str, change: str) -> str:
    return f"/v1/cluster/workers/{urllib.parse.quote(worker_id, safe='')}/{change}"


def _worker(state: Mapping[str, Any], worker_id: str) -> Mapping[str, Any] | None:
    return next((w for w in state["workers"] if w["worker_id"] == worker_id), None)


def _process(state: Mapping[str, Any], worker_id: str) -> tuple[Any, ...]:
    """Returns (host, pid, start time) of a worker's process; () if the process has ended. The
    worker's id does not identify the process, because the next process of a worker has the same id.
    """
    worker = _worker(state, worker_id)
    return () if worker is None else (worker["host"], worker["pid"], worker["started_at"])


def scale_steps(
    initial: Mapping[str, Any], state: Mapping[str, Any], wanted: Mapping[str, int]
) -> list[ProgressRow]:
    """Builds progress rows: one for each pool that has not reached its wanted size, then one for
    each starting or leaving worker of these pools."""
    steps = []
    for pool, size in wanted.items():
        if missing := differences(state["pools"], {pool: size}):
            distance, left = (_distance(s["pools"].get(pool, {}), size) for s in (initial, state))
            note = missing[0].removeprefix(f"{pool}: ")
            steps.append(ProgressRow(pool, note, max(0, distance - left), max(1, distance)))
    for row in state.get("known_workers", ()):
        if row["pool"] in wanted and row["state"] not in ("ready", "stopped"):
            steps.append(ProgressRow(row["worker_id"], _state_text(row)))
    return steps


def _distance(pool: Mapping[str, Any], size: int) -> int:
    """Counts the processes that still have to start, end or become ready until the pool has this
    size."""
    running = pool.get("running", pool.get("registered", 0))
    return int(max(abs(running - size), size - pool.get("ready", size)))


def drain_step(initial: Mapping[str, Any], state: Mapping[str, Any], worker_id: str) -> ProgressRow:
    """Builds the progress row of a draining worker: how many of its sequences and leases have
    ended."""
    rows = {row["worker_id"]: row for row in state.get("known_workers", ())}
    total, left = (_num_held(_worker(s, worker_id)) for s in (initial, state))
    note = _state_text(rows[worker_id]) if worker_id in rows else "draining"
    return ProgressRow(worker_id, note, max(0, total - left), total)


def _num_held(worker: Mapping[str, Any] | None) -> int:
    load = worker["load"] if worker is not None else {}
    return sum(load.get(name, 0) for name in ("num_running", "num_waiting", "num_leases"))


def _state_text(row: Mapping[str, Any]) -> str:
    return f"{row['state']}: {row['note']}" if row["note"] else str(row["state"])


def parse_sizes(sizes: Sequence[str]) -> dict[str, int]:
    """Parses POOL=SIZE arguments. Raises OperateError that names the invalid argument."""
    wanted = {}
    for argument in sizes:
        pool, _, size = argument.partition("=")
        if not pool or not size.isdecimal():
            raise OperateError(
                f"{argument!r} is not POOL=SIZE, such as prefill=2; a size is from 0 to "
                f"{POOL_SIZE_MAX}"
            )
        if pool in wanted:
            raise OperateError(f"the pool {pool!r} is named twice")
        wanted[pool] = int(size)
    return wanted


def differences(pools: dict[str, Any], wanted: dict[str, int]) -> list[str]:
    """Returns one line for each pool that has not reached its size in `wanted`.

    For example, a pool of size 3 has reached its size if 3 processes run and 3 workers are ready.
    Without a pool controller, as on Kubernetes, no processes are known. Registered workers are then
    counted instead, and the router pool is never listed, because routers are not counted.
    """
    found = []
    has_processes = not pools or any("agents" in state for state in pools.values())
    for pool, size in wanted.items():
        state = pools.get(pool, {})
        if not has_processes:
            registered = state.get("registered", 0)
            ready = state.get("ready", 0)
            if pool != "router" and not registered == ready == size:
                found.append(f"{pool}: {registered} registered, {ready} ready, {size} wanted")
            continue
        running = state.get("running", 0)
        agents = len(state.get("agents", ()))
        ready = size if pool == "router" else state.get("ready", 0)
        if state.get("wanted") != size or not running == agents == ready == size:
            why = f"; {state['waits_why']}" if "waits_why" in state else ""
            found.append(f"{pool}: {running} running, {ready} ready, {size} wanted{why}")
    return found


def call_router(
    url: str,
    method: str,
    body: Mapping[str, object] | None = None,
    *,
    path: str = "/v1/cluster",
    deadline_s: float = _REPLY_DEADLINE_S,
    keep: str = "",
) -> Any:
    """Calls a router and returns its JSON answer. Some strings in the answer come from clients, so
    all strings are made printable, except for the characters in `keep`. Raises OperateError."""
    if not url.startswith(("http://", "https://")):
        raise OperateError(f"the URL {url!r} of a router must begin with http:// or https://")
    try:
        request = urllib.request.Request(
            url.rstrip("/") + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **authorization()},
        )
        with urllib.request.urlopen(request, timeout=deadline_s) as reply:
            return printable_json(json.load(reply), keep=keep)
    except urllib.error.HTTPError as error:
        raise OperateError(_error_message(error)) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        is_other = isinstance(error, http.client.BadStatusLine)
        reason = "no HTTP server answers there" if is_other else getattr(error, "reason", error)
        raise OperateError(
            f"no router answers at {url} ({printable(str(reason))}); start a cluster with "
            "`tandem up`, or name another router's admin address with --url"
        ) from error


def call_with_progress(
    url: str,
    method: str,
    body: Mapping[str, object] | None = None,
    *,
    path: str = "/v1/cluster",
    deadline_s: float = _REPLY_DEADLINE_S,
) -> Any:
    """Calls a router like `call_router`, and shows a progress row until the router answers. Raises
    OperateError."""
    with Waiting(ProgressRow(url, "waiting for the router's answer")):
        return call_router(url, method, body, path=path, deadline_s=deadline_s)


def authorization() -> dict[str, str]:
    """Builds the header with the API key; empty if there is no key. Raises OperateError."""
    key = api_key()
    return {"Authorization": f"Bearer {key}"} if key else {}


def api_key() -> str:
    """Returns the API key from the variable API_KEY_VARIABLE, else from the file that
    API_KEY_FILE_VARIABLE names; "" if neither is set. Raises OperateError if the file cannot be
    read."""
    if key := os.environ.get(API_KEY_VARIABLE):
        return key
    path = os.environ.get(API_KEY_FILE_VARIABLE)
    try:
        return Path(path).read_text("utf-8").strip() if path else ""
    except (OSError, UnicodeDecodeError) as error:
        raise OperateError(f"{API_KEY_FILE_VARIABLE}: {path} cannot be read: {error}") from None


def _error_message(error: urllib.error.HTTPError) -> str:
    if error.code == 401:
        if not os.environ.get(API_KEY_VARIABLE):
            return f"the router needs an operator's API key: set {API_KEY_VARIABLE}"
        return f"the router refuses the API key in {API_KEY_VARIABLE}: it is unknown or has expired"
    try:
        return printable(str(json.load(error)["error"]["message"]))
    except (ValueError, KeyError, TypeError):
        return printable(f"the router answers {error.code} {error.reason}")


def memory_warnings(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Formats one line for each host whose memory is low. Workers of older versions do not report
    their memory and are skipped."""
    found: dict[str, tuple[int, int]] = {}
    for worker in workers:
        free = worker.get("memory_free_bytes", 0)
        total = worker.get("memory_total_bytes", 0)
        if free < _MEMORY_LOW_SHARE * total:
            found[worker["host"]] = (free, total)
    return [
        f"memory is low on host {host}: {free / 1e9:.1f} GB of {total / 1e9:.1f} GB are free"
        for host, (free, total) in found.items()
    ]

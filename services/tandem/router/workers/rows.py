"""Makes a row for each known worker, alive or not, and a headline of the problems. Does no I/O.

Operators see the rows and the headline. A worker is known if one of these is true:
- It has a record in Redis, or had a record recently.
- It loads its model and has written a notice.
- It has an agent, which keeps the worker's process running (`tandem up`).
The record says what the worker does. The agent says why a worker has no record.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from tandem.common.config.cluster import ROUTER_POOLS
from tandem.common.pool_sizes import sizes_in_words
from tandem.net.store.registry import WorkerRecord
from tandem.router.workers.loading import LoadingNow
from tandem.router.workers.troubles import Trouble, blames_peers, clock_of_router, trouble_of

_PROBLEMS_MAX = 2  # largest number of problems named in the headline
_NAMES_MAX = 3  # largest number of workers named in a remedy

RowState = (
    Literal["ready", "starting", "loading", "draining", "restarting", "silent", "hung"]
    | Literal["not connected", "incompatible", "failed", "stopped", "lost"]
)
_IS_WELL = {"ready", "draining"}  # draining is no problem, because an operator requested it
# If a loading worker reads no weights for 8 s, the worker's row says so. After 30 s, the worker has
# the trouble "stalled". A short pause is normal, because the worker also imports Python modules.
_STALLS_S, _STALLED_S = 8.0, 30.0
_WAIT = "Nothing has to be done about NAMES: "
_WAITS = f"{_WAIT}a worker takes requests when its model is loaded."
# What an operator can do about a worker's problem. NAME stands for the worker's id, and NAMES for
# all workers with the problem.
_REMEDIES = {
    "starting": _WAITS,
    "loading": _WAITS,
    "restarting": f"{_WAIT}a worker restarts by itself. `tandem logs NAME` shows why its process "
    "ended.",
    "silent": "Look at `tandem logs NAME`, at the worker's host and at the host's network.",
    "hung": f"{_WAIT}a worker whose engine hangs ends itself and is restarted.",
    "not connected": "If this persists, check the network between the router and the worker.",
    "incompatible": "Start the worker again with the router's model.",
    "failed": "`tandem logs NAME` shows the whole error.",
    "lost": "Start the worker's host again, or check its network.",
    "clock": "Synchronize the clocks of the hosts, for example with chrony.",
    "disk": "Free space on this disk.",
    "unreachable": "Check the network between the hosts of these workers.",
    "tier": "Check the disk or the object store that holds these copies.",
    "stalled": "Check the disk or the network from which the model is read.",
}


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker with a record, as this router sees it.

    `silent_s` is the time since the worker last wrote its record, or 0 if no write is overdue.
    `stuck_s` is the time for which the engine has made no step although it has work, or 0 if no
    step is overdue. `clock_ahead_s` is the worker's clock minus this router's clock.
    """

    record: WorkerRecord
    is_compatible: bool = True
    is_connected: bool = True
    silent_s: float = 0.0
    stuck_s: float = 0.0
    num_left: tuple[int, int] = (0, 0)  # (unfinished sequences, leases), shown during a drain
    why_down: str = ""  # why the router's stream to the worker last ended; "": it never ended
    clock_ahead_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Gone:
    """A worker whose record has gone. `has_left` is True if the worker shut down normally."""

    record: WorkerRecord
    at: float  # time in seconds since 1970 at which the router found that the record is missing
    has_left: bool
    silent_s: float = 0.0  # seconds for which the worker had not written its record before `at`


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker as operators see it.

    `trouble` is a fault of a ready or loading worker, such as a full disk. `state` tells whether
    the worker runs at all.
    """

    worker_id: str
    pool: str
    state: RowState
    note: str = ""
    trouble: Trouble = ""
    host: str = ""

    @property
    def is_well(self) -> bool:
        """True if no operator needs to look at the worker."""
        is_stopped = self.state == "stopped" and not self.note
        return not self.trouble and (self.state in _IS_WELL or is_stopped)

    @property
    def problem(self) -> str:
        """The worker's problem in one word; "" if it has none."""
        return "" if self.is_well else self.trouble or self.state


def worker_rows(
    seen: Iterable[Seen],
    gone: Mapping[str, Gone],
    pools: Mapping[str, Mapping[str, Any]],
    now: float,
    loading: Mapping[str, LoadingNow] | None = None,
) -> list[WorkerRow]:
    """Returns the rows, sorted by pool and id.

    - `pools` maps each pool's name to its state. If a pool controller exists, the state also lists
      the agents of the pool's workers.
    - `loading` maps worker ids to the notices of workers that load their model.
    """
    agents = {
        agent["id"]: (pool, agent)
        for pool, state in pools.items()
        if pool not in ROUTER_POOLS
        for agent in state.get("agents", ())
    }
    seen = list(seen)
    common_s = clock_of_router([worker.clock_ahead_s for worker in seen])
    blaming = [s.record for s in seen if blames_peers(s.record) and not s.silent_s]
    rows = []
    for worker in seen:
        worker_id = worker.record.worker_id
        pool = worker.record.pool or worker.record.role
        _, agent = agents.pop(worker_id, ("", {}))
        if agent.get("state") in ("restarting", "lost"):
            rows.append(_of_agent(worker_id, pool, agent, now))
        elif _has_new_process(agent, worker):
            # The record was written by the previous process and has not expired yet.
            progress = (loading or {}).get(worker_id)
            rows.append(_without_record(worker_id, pool, agent, progress, None, now))
        else:
            rows.append(_of_seen(worker, agent, blaming, worker.clock_ahead_s - common_s))
    known = {row.worker_id for row in rows}
    loading = {name: progress for name, progress in (loading or {}).items() if name not in known}
    for worker_id, (pool, agent) in agents.items():
        progress = loading.pop(worker_id, None)
        last = gone.get(worker_id)
        rows.append(_without_record(worker_id, pool, agent, progress, last, now))
        known.add(worker_id)
    for worker_id, progress in loading.items():
        rows.append(_of_loading(worker_id, progress))
        known.add(worker_id)
    for worker_id, last in gone.items():
        if worker_id not in known:
            pool = last.record.pool or last.record.role
            rows.append(WorkerRow(worker_id, pool, *_of_gone(last, now), host=host_of(last.record)))
    return sorted(rows, key=lambda row: (row.pool, row.worker_id))


def problems_of(
    rows: Iterable[WorkerRow],
    pools: Mapping[str, Mapping[str, Any]],
    *,
    reason: str,
    redis: str,
    cluster: Iterable[str] = (),
) -> list[str]:
    """Returns a phrase for each problem, the worst first.

    `reason` says why no request can be served, or is "". `redis` is the router's view of Redis.
    `cluster` has the phrases of `ClusterView.cluster_problems`.
    """
    problems = [reason] if reason else []
    if redis == "lost":
        problems.append(
            "Redis does not answer: this router uses the last known workers, and pool sizes "
            "cannot be changed"
        )
    problems += cluster
    problems += _row_problems(list(rows))
    for pool, state in pools.items():
        wanted = state.get("wanted", state.get("replicas"))
        # An agent that has not reported yet (since is 0) adopts or starts its process.
        agents = [a for a in state.get("agents", ()) if a.get("since", 1.0)]
        starting = len(state.get("agents", ())) - len(agents) if pool in ROUTER_POOLS else 0
        running = state.get("running", state.get("registered", 0)) + starting
        # A process may serve before its agent reports it. So the number of running processes is at
        # least the number of ready workers, and at least 1 router runs: this router.
        running = max(running, state.get("ready", 0), int(pool == "router"))
        if wanted is not None and running < wanted and not problems:
            why = f": {state['waits_why']}" if "waits_why" in state else ""
            problems.append(f"the {pool} pool has {running} of {wanted} wanted processes{why}")
    return problems


def headline(
    problems: list[str],
    pools: Mapping[str, Mapping[str, Any]],
    rows: Iterable[WorkerRow] = (),
    effect: str = "",
) -> str:
    """Returns the first problems, their effect on requests, and the remedy for the first faulty
    worker; or one sentence saying that all is well."""
    if not problems:
        pairs = [(s["ready"], p) for p, s in pools.items() if p not in ROUTER_POOLS]
        ready = sizes_in_words((pool, number) for number, pool in pairs) or "0"
        total = sum(number for number, _ in pairs)
        return f"All is well: {ready} {'worker is' if total == 1 else 'workers are'} ready."
    more = len(problems) - _PROBLEMS_MAX
    text = "; ".join(problems[:_PROBLEMS_MAX])
    end = f"; and {more} more." if more > 0 else "" if text.endswith("?") else "."
    first = text.partition(" ")[0].rstrip(",")
    if not first[-1:].isdigit():  # the id of a worker stays as it is
        text = text[0].upper() + text[1:]
    return " ".join(filter(None, (text + end, effect, remedy_of(rows))))


def effect_of(*, reason: str, num_moved: int, pools: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns a sentence with the effect of a problem on requests.

    `reason` says why no request can be served, or is "". `num_moved` is the number of requests that
    recently moved to another worker, because their worker was lost or drained.
    """
    moved = f"{_count(num_moved, 'request')} moved to other workers" if num_moved else ""
    if reason:
        return "Requests are not served."
    served = "requests are served"
    if "prefill" in pools and not pools["prefill"].get("serving", 1):
        served += ", and decode workers prefill the prompts"
    text = f"{moved}; {served}." if moved else f"{served}."
    return text[0].upper() + text[1:]


def remedy_of(rows: Iterable[WorkerRow]) -> str:
    """Returns a sentence that says what to do about the first faulty worker; "" if none is
    faulty."""
    faulty = [row for row in rows if not row.is_well and row.state != "stopped"]
    if not faulty:
        return ""
    first = faulty[0]
    if "SIGSTOP" in first.note:
        return "Continue the stopped process with `kill -CONT` and its process id."
    same = [row.worker_id for row in faulty if row.problem == first.problem]
    names = ", ".join(same) if len(same) <= _NAMES_MAX else f"these {len(same)} workers"
    remedy = _REMEDIES.get(first.problem, "")
    return remedy.replace("NAMES", names).replace("NAME", first.worker_id)


def _row_problems(rows: list[WorkerRow]) -> list[str]:
    """Returns a phrase for each faulty worker, and one for each silent host.

    Workers with the same state and note share one phrase. A host is silent if several workers run
    there, and all these workers are silent or lost. No phrase is made for workers of a silent host.
    """
    hosts: dict[str, list[WorkerRow]] = {}
    for row in rows:
        if row.host:
            hosts.setdefault(row.host, []).append(row)
    silent = {
        host: found
        for host, found in hosts.items()
        if len(found) > 1 and len(hosts) > 1 and all(r.state in ("silent", "lost") for r in found)
    }
    phrases = [
        f"host {host} is down or cut off, with all its workers: "
        f"{', '.join(row.worker_id for row in found)}"
        for host, found in silent.items()
    ]
    same: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if not row.is_well and row.host not in silent:
            same.setdefault((row.state, row.note), []).append(row.worker_id)
    for (state, note), names in same.items():
        verb = "is" if len(names) == 1 else "are"
        phrases.append(f"{', '.join(names)} {verb} {state}" + (f": {note}" if note else ""))
    return phrases


def _of_seen(
    worker: Seen, agent: Mapping[str, Any], blaming: list[WorkerRecord], clock_ahead_s: float
) -> WorkerRow:
    record = worker.record
    pool = record.pool or record.role
    host = host_of(record)
    state, note = _of_record(worker, agent)
    trouble: Trouble = ""
    if state == "ready":
        trouble, note = trouble_of(record, clock_ahead_s, blaming)
    return WorkerRow(record.worker_id, pool, state, note, trouble, host)


def _of_record(worker: Seen, agent: Mapping[str, Any]) -> tuple[RowState, str]:
    if worker.silent_s:
        return "silent", _silence(worker.silent_s, agent)
    if worker.stuck_s:
        return "hung", f"its engine has work, but has computed no step for {worker.stuck_s:.0f} s"
    if not worker.is_compatible:
        return "incompatible", "it serves another model than this router"
    if worker.record.state == "draining":
        num_sequences, num_leases = worker.num_left
        left = f"{_count(num_sequences, 'sequence')} and {_count(num_leases, 'lease')} are left"
        return "draining", left
    if not worker.is_connected:
        why = f" ({worker.why_down})" if worker.why_down else ""
        return "not connected", f"this router cannot reach it at {worker.record.address}{why}"
    return worker.record.state, ""


def _has_new_process(agent: Mapping[str, Any], worker: Seen) -> bool:
    """Returns whether the agent has started a process that has not written a record yet.

    If the record and the agent's report name different processes, either may be outdated. The
    report is outdated, for example, while Ray has no head. The record is outdated if its process is
    silent or disconnected, or started before the agent reported its own process. The comparison of
    these times tolerates inexact clocks, because the previous process ran for a while in between.
    """
    record = worker.record
    if agent.get("state") != "running" or agent.get("pid", 0) in (0, record.pid):
        return False
    is_away = bool(worker.silent_s) or not worker.is_connected
    return is_away or 0 < record.started_at < agent.get("since", 0.0)


def _silence(silent_s: float, agent: Mapping[str, Any]) -> str:
    """Describes a worker that does not write its record."""
    silence = f"it has not reported for {silent_s:.0f} s"
    if agent.get("is_stopped"):
        return f"its process {agent['pid']} is stopped (SIGSTOP), and {silence}"
    if host := agent.get("host"):
        return f"{silence}: its host {host} is down or cut off, or its process hangs"
    if agent.get("state") == "running":
        return f"{silence}, but its process {agent.get('pid')} runs"
    return silence


def _without_record(
    worker_id: str,
    pool: str,
    agent: Mapping[str, Any],
    progress: LoadingNow | None,
    last: Gone | None,
    now: float,
) -> WorkerRow:
    """Returns the row of a worker that has an agent and no record."""
    row = _of_agent(worker_id, pool, agent, now)
    if row.state != "loading":
        return row
    if last and agent.get("pid") == last.record.pid:  # the agent's process wrote the lost record
        if last.has_left:
            return WorkerRow(worker_id, pool, "draining", "its process ends")
        silence = _silence(last.silent_s + max(0.0, now - last.at), agent)
        return WorkerRow(worker_id, pool, "silent", silence, host=host_of(last.record))
    if agent.get("is_stopped"):
        row = replace(row, note=f"its process {agent['pid']} is stopped (SIGSTOP)")
    if progress is None:
        return row
    if progress.notice.failed:
        return WorkerRow(worker_id, pool, "failed", progress.notice.failed)
    note = "; ".join(filter(None, (_loaded(progress), row.note)))
    return replace(row, note=note, trouble=_stalled(progress))


def _of_agent(worker_id: str, pool: str, agent: Mapping[str, Any], now: float) -> WorkerRow:
    """Returns the row of a worker of which only the agent's report is known."""
    ended = ending(agent)
    match agent.get("state"):
        case "restarting":
            starts = agent.get("starts", 0)
            why = f"its process {ended}" if ended else "its process ended"
            again = f"; it has been restarted {_count(starts, 'time')} already" if starts else ""
            return WorkerRow(worker_id, pool, "restarting", f"{why}{again}")
        case "draining":
            return WorkerRow(worker_id, pool, "draining", "its process ends")
        case "lost":
            host = agent.get("host", "")
            return WorkerRow(worker_id, pool, "lost", f"its host {host} is down or cut off")
        case _:
            since = agent.get("since", 0.0)
            notes = [f"started {max(0.0, now - since):.0f} s ago"] if since else []
            if ended:
                notes.append(f"its previous process {ended}")
            return WorkerRow(worker_id, pool, "loading", "; ".join(notes))


def ending(agent: Mapping[str, Any]) -> str:
    """Describes how the worker's previous process ended, as in "was ended by SIGKILL". Returns ""
    if there was none."""
    how = agent.get("exit") or ""
    line = agent.get("last_line")
    if not how and not line:
        return ""
    if how == "exit status 0":  # a process that drained, or that an operator ended with SIGTERM
        return "ended normally"
    if not how:
        how = "ended"
    elif how.startswith("ended by"):
        how = f"was {how}"
    else:
        how = f"ended with {how}"
    return how + (f" after it had logged: {line}" if line else "")


def _of_loading(worker_id: str, progress: LoadingNow) -> WorkerRow:
    if progress.notice.failed:
        return WorkerRow(worker_id, progress.notice.pool, "failed", progress.notice.failed)
    if progress.silent_s:
        note = f"it was loading ({_loaded(progress)}) and has not reported for "
        note += f"{progress.silent_s:.0f} s"
        return WorkerRow(worker_id, progress.notice.pool, "silent", note)
    pool = progress.notice.pool
    return WorkerRow(worker_id, pool, "loading", _loaded(progress), _stalled(progress))


def _stalled(progress: LoadingNow) -> Trouble:
    return "stalled" if progress.stalled_s > _STALLED_S else ""


def _loaded(progress: LoadingNow) -> str:
    notice = progress.notice
    stalled_s = progress.stalled_s
    if notice.num_bytes_all:
        percent = 100 * notice.num_bytes // notice.num_bytes_all
        loaded = f"{percent}% of its weights ({notice.num_bytes_all / 1e9:.2g} GB)"
    else:
        loaded = "0% of its weights"
    return f"{loaded}, no progress for {stalled_s:.0f} s" if stalled_s > _STALLS_S else loaded


def _of_gone(last: Gone, now: float) -> tuple[RowState, str]:
    ago_s = max(0.0, now - last.at)
    if last.has_left:
        return "stopped", ""
    return "lost", f"it stopped reporting {ago_s:.0f} s ago; it was at {last.record.address}"


def host_of(record: WorkerRecord) -> str:
    """Returns a worker's host name and address, such as gpu-3 (10.0.0.3).

    Both are needed, because hosts may share a name and many pods may share an address.
    """
    address = record.address.rpartition(":")[0].strip("[]")
    return f"{record.host} ({address})" if address else record.host


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")

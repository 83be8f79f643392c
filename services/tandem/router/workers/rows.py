"""A row for each worker that is known, alive or not, and a sentence that says what is wrong. Pure.

Known is a worker that has a record, had one of late, or has an agent that keeps its process
running (`tandem up`). The record tells what the worker does, the agent why there is no record.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tandem.store.registry import WorkerRecord

_PROBLEMS_MAX = 2  # that the sentence names

RowState = (
    Literal["ready", "starting", "loading", "draining", "restarting", "silent", "hung"]
    | Literal["not connected", "incompatible", "stopped", "lost"]
)
_IS_WELL = {"ready", "draining"}  # a drain is somebody's wish


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker with a record, as this router sees it. `silent_s` and `stuck_s` are 0 if it is on
    time."""

    record: WorkerRecord
    is_compatible: bool = True
    is_connected: bool = True
    silent_s: float = 0.0
    stuck_s: float = 0.0
    num_left: tuple[int, int] = (0, 0)  # sequences and leases


@dataclass(frozen=True, slots=True)
class Gone:
    """A worker whose record has gone. `has_left`: it drained, and took its record away."""

    record: WorkerRecord
    at: float  # seconds since the Unix epoch
    has_left: bool


@dataclass(frozen=True, slots=True)
class WorkerRow:
    worker_id: str
    pool: str
    state: RowState
    note: str = ""

    @property
    def is_well(self) -> bool:
        """Returns whether nobody needs to look at it."""
        return self.state in _IS_WELL or (self.state == "stopped" and not self.note)


def worker_rows(
    seen: Iterable[Seen],
    gone: Mapping[str, Gone],
    pools: Mapping[str, Mapping[str, Any]],
    now: float,
) -> list[WorkerRow]:
    """Returns the rows by pool and id; `pools` are those that a pool controller wrote, if any."""
    agents = {
        agent["id"]: (pool, agent)
        for pool, state in pools.items()
        if pool != "router"
        for agent in state.get("agents", ())
    }
    rows = []
    for worker in seen:
        worker_id = worker.record.worker_id
        pool = worker.record.pool or worker.record.role
        _, agent = agents.pop(worker_id, ("", {}))
        if agent.get("state") == "restarting":
            rows.append(_of_agent(worker_id, pool, agent, now))
        else:
            rows.append(WorkerRow(worker_id, pool, *_of_record(worker)))
    known = {row.worker_id for row in rows}
    for worker_id, (pool, agent) in agents.items():
        rows.append(_of_agent(worker_id, pool, agent, now))
        known.add(worker_id)
    for worker_id, last in gone.items():
        if worker_id not in known:
            pool = last.record.pool or last.record.role
            rows.append(WorkerRow(worker_id, pool, *_of_gone(last, now)))
    return sorted(rows, key=lambda row: (row.pool, row.worker_id))


def headline(
    rows: Iterable[WorkerRow],
    pools: Mapping[str, Mapping[str, Any]],
    *,
    reason: str,
    redis: str,
) -> str:
    """Returns one sentence that says what is wrong, the worst first. `reason` says why requests
    cannot be served; it is empty if they can."""
    problems = [reason] if reason else []
    if redis == "lost":
        problems.append("Redis does not answer: the last known workers serve on, sizes stand")
    problems += [f"{r.worker_id} is {r.state}: {r.note}" for r in rows if not r.is_well]
    for pool, state in pools.items():
        wanted, running = state.get("wanted"), state.get("running", state.get("registered", 0))
        if wanted is not None and running < wanted and not problems:
            problems.append(f"the {pool} pool has {running} of {wanted} wanted processes")
    if not problems:
        ready = ", ".join(f"{s['ready']} {p}" for p, s in pools.items() if p != "router")
        return f"All is well: workers that are ready: {ready}."
    more = len(problems) - _PROBLEMS_MAX
    told = "; ".join(problems[:_PROBLEMS_MAX])
    return told[0].upper() + told[1:] + (f"; and {more} more." if more > 0 else ".")


def _of_record(worker: Seen) -> tuple[RowState, str]:
    if worker.silent_s:
        return "silent", f"it has written nothing for {worker.silent_s:.0f} s"
    if worker.stuck_s:
        return "hung", f"its engine has work and made no turn for {worker.stuck_s:.0f} s"
    if not worker.is_compatible:
        return "incompatible", "it serves another model than this router"
    if worker.record.state == "draining":
        num_sequences, num_leases = worker.num_left
        left = f"{_count(num_sequences, 'sequence')} and {_count(num_leases, 'lease')} are left"
        return "draining", left
    if not worker.is_connected:
        return "not connected", f"this router has no stream to {worker.record.address}"
    return worker.record.state, ""


def _of_agent(worker_id: str, pool: str, agent: Mapping[str, Any], now: float) -> WorkerRow:
    """Returns the row of a worker that only its agent knows."""
    match agent.get("state"):
        case "restarting":
            ended = " ".join(filter(None, (f"attempt {agent['starts'] + 1}", agent.get("exit"))))
            line = agent.get("last_line")
            note = ended + (f", its last log line: {line}" if line else "")
            return WorkerRow(worker_id, pool, "restarting", note)
        case "draining":
            return WorkerRow(worker_id, pool, "draining", "its process ends")
        case _:
            since = agent.get("since", 0.0)
            note = f"for {max(0.0, now - since):.0f} s" if since else ""
            return WorkerRow(worker_id, pool, "loading", note)


def _of_gone(last: Gone, now: float) -> tuple[RowState, str]:
    ago_s = max(0.0, now - last.at)
    if last.has_left:
        return "stopped", ""
    return "lost", f"its record expired {ago_s:.0f} s ago; it was at {last.record.address}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")

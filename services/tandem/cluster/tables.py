"""The tables of `tandem status`, `audit` and `index verify`, for wide screens and for 80 columns.

This module prints nothing, and text is never interpreted as rich's markup. If a table is too wide
for the screen, its last columns or its notes follow below it.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tandem.common.config.cluster import ROUTER_POOLS
from tandem.common.kv_tiers import SHARED_TIERS

_REQUESTS = ("decoding", "in prefill\nor queued")
_LOAD_COLUMNS = ("worker", "role", "state", "up", *_REQUESTS, "prompt\ntokens", "KV")
_RANKS, _TIERS = "ranks", "KV in tiers"
_MORE_COLUMNS = ("measured", "pulls from")
_WHYS_MAX = 8
_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0))


def table(*columns: str) -> Table:
    return Table(*columns, box=None, pad_edge=False)


def fits(made: Table, screen: Console) -> bool:
    """Says whether the table fits the screen without wrapped cells."""
    room = screen.options.update(max_width=100_000)
    return Measurement.get(screen, room, made).maximum <= screen.width


def pools_table(pools: Mapping[str, Any]) -> Table:
    made = table("pool", "wanted", "running", "ready", "serving", "processes")
    for name, pool in pools.items():
        agents = ", ".join(f"{a['id']} {a['state']}" for a in pool.get("agents", ()))
        is_router = name in ROUTER_POOLS
        ready, serving = ("-" if is_router else str(pool.get(k, 0)) for k in ("ready", "serving"))
        wanted = pool.get("wanted", pool.get("replicas", "-"))
        running = pool.get("running", pool.get("registered", "-"))
        made.add_row(*map(Text, (name, str(wanted), str(running), ready, serving, agents)))
    return made


def placed_whys(pools: Mapping[str, Any]) -> list[str]:
    """Formats one line for each process for which hosts with a slow network path were avoided
    (nearness.py); at most _WHYS_MAX lines."""
    agents = [agent for pool in pools.values() for agent in pool.get("agents", ())]
    return [
        f"{agent['id']} runs on {agent['host']}, because {agent['placed_why']}"
        for agent in agents
        if agent.get("placed_why") and agent["state"] not in ("draining", "lost")
    ][-_WHYS_MAX:]


def waiting_pools(state: Mapping[str, Any]) -> list[str]:
    """Formats one line for each pool that waits for a GPU, unless the headline of `state` already
    has the reason."""
    headline = state.get("headline", "")
    whys = {name: pool.get("waits_why", "") for name, pool in state["pools"].items()}
    return [
        f"the {name} pool waits for a GPU: {why}"
        for name, why in whys.items()
        if why and why not in headline
    ]


def worker_tables(
    workers: Sequence[Mapping[str, Any]], known: Sequence[Mapping[str, str]], screen: Console
) -> Iterator[RenderableType]:
    """Yields the tables of the workers. `workers` has only the workers with a record in Redis.
    `known` has a row for every worker that the cluster knows."""
    rows = list(_rows(workers, known))
    more = [
        *([_RANKS] if any(row.num_ranks > 1 for row in rows) else []),
        *([_TIERS] if any(row.tiers for row in rows) else []),
        *_MORE_COLUMNS,
    ]
    wide = table(*_LOAD_COLUMNS, *more)
    for row in rows:
        wide.add_row(*map(Text, (*row.loads, *row.rest(more, ", "))))
    if fits(wide, screen):
        yield wide
        return
    loads = table(*_LOAD_COLUMNS)
    speeds = table("worker", *more)
    notes = []
    for column in (*loads.columns, speeds.columns[0]):
        column.no_wrap = True
    for row in rows:
        name, role, described, *numbers = row.loads
        state, _, note = described.partition(": ")
        loads.add_row(*map(Text, (name, role, state, *numbers)))
        if note:
            notes.append(Padding(Text(f"{name} is {state}: {note}"), (0, 0, 0, 2)))
        if row.has_record:
            speeds.add_row(*map(Text, (name, *row.rest(more, "\n"))))
    yield loads
    yield from notes
    if speeds.row_count:
        yield ""
        yield speeds


def audit_tables(entries: Sequence[Mapping[str, Any]], screen: Console) -> Iterator[RenderableType]:
    """Yields the tables of the audit trail's entries, newest last."""
    wide = table("time (UTC)", "router", "caller", "key", "what", "before", "after", "outcome")
    rows = [_audited(entry) for entry in reversed(entries)]
    for row in rows:
        wide.add_row(*map(Text, row))
    if fits(wide, screen):
        yield wide
        return
    for at, router, caller, key, what, before, after, outcome in rows:
        by = caller if key == "-" else f"{caller}, key {key}"
        yield Text(f"{at}  {router}  {by}")
        change = what if before == after == "-" else f"{what}: {before} -> {after}"
        yield Padding(Text(f"{change}: {outcome}"), (0, 0, 0, 4))


def index_table(workers: Mapping[str, Mapping[str, Any]]) -> Table:
    """Builds the table of `tandem index verify`, which compares each worker's blocks with the
    prefix tree."""
    made = table("worker")
    for name in ("checked", "missing", "stale"):
        made.add_column(name, justify="right")
    made.add_column("verdict")
    for worker_id, worker in sorted(workers.items()):
        numbers = [f"{worker[name]:,}" for name in ("checked", "missing", "stale")]
        if worker["error"]:
            numbers = ["-"] * 3
            verdict = Text(worker["error"], "red")
        elif not worker["in_tree"]:
            verdict = Text("the prefix tree has no entries of this worker", "red")
        else:
            verdict = Text("ok", "green") if worker["ok"] else Text("differs", "red")
        made.add_row(Text(worker_id), *numbers, verdict)
    return made


def duration(seconds: float) -> str:
    """Formats a duration with a suitable unit, such as 35 min."""
    for unit, length_s in _UNITS:
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"


@dataclass(frozen=True, slots=True)
class _Row:
    """The cells of one worker in the tables. For a worker without a record in Redis, there are
    only the first three cells of `loads`: id, role and state."""

    loads: list[str]
    has_record: bool = False
    num_ranks: int = 1
    tiers: list[str] = field(default_factory=list)
    speed: str = ""
    peers: list[str] = field(default_factory=list)

    def rest(self, columns: Sequence[str], between: str) -> list[str]:
        """Formats the cells of `columns`, which follow the load columns. `between` separates
        several tiers or peers in one cell."""
        if not self.has_record:
            return ["-"]
        tiers, peers = (between.join(cell) or "-" for cell in (self.tiers, self.peers))
        cells = dict(zip(_MORE_COLUMNS, (self.speed, peers), strict=True))
        cells |= {_RANKS: str(self.num_ranks), _TIERS: tiers}
        return [cells[column] for column in columns]


def _rows(
    workers: Sequence[Mapping[str, Any]], known: Sequence[Mapping[str, str]]
) -> Iterator[_Row]:
    rows = {row["worker_id"]: row for row in known}
    for worker in workers:
        load = worker["load"]
        loads = [
            worker["worker_id"],
            worker["role"],
            _state(worker, rows.pop(worker["worker_id"], None)),
            duration(max(0.0, time.time() - worker["started_at"])),
            *_requests(worker["role"], load),
            str(load["queued_tokens"]),
            f"{worker['kv_use']:.0%} of {load['blocks_total']}",
        ]
        # older routers send neither ranks nor tiers
        tiers = [_tier(tier) for tier in worker.get("tiers", ())]
        num_ranks = worker.get("num_ranks", 1)
        yield _Row(loads, True, num_ranks, tiers, _rates(worker.get("rates")), _pairs(worker))
    for row in rows.values():
        yield _Row([row["worker_id"], row["pool"], _state_text(row)])


def _requests(role: str, load: Mapping[str, int]) -> tuple[str, str]:
    """Formats the numbers of a worker's requests, as `WorkerLoad` counts them. A request belongs to
    its decode worker, so most prefill workers have prompts and no requests."""
    if role == "prefill":
        num_decoding = load["num_running"] - load.get("num_prefilling", 0)
        return str(num_decoding) if num_decoding > 0 else "-", "-"
    if role == "encode":  # it counts images
        return str(load["num_running"]), str(load["num_waiting"])
    num_prefilling = load.get("num_prefilling", 0)  # older workers do not send it
    others = num_prefilling + load.get("num_pulls", 0) + load["num_waiting"]
    return str(load["num_running"] - num_prefilling), str(others)


def _audited(entry: Mapping[str, Any]) -> tuple[str, ...]:
    caller = entry["caller"]
    key = f"{caller['key_id']} of {caller['tenant']}" if caller["key_id"] else "-"
    why = f": {entry['why']}" if entry.get("why") else ""
    return (
        time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(entry["at"])),
        entry["router_id"],
        caller["address"],
        key,
        *(entry.get(name) or "-" for name in ("what", "before", "after")),
        entry["outcome"] + why,
    )


def _state(worker: Mapping[str, Any], row: Mapping[str, str] | None) -> str:
    if row is not None:
        return _state_text(row)
    return worker["state"] if worker["compatible"] else f"{worker['state']}, incompatible"


def _state_text(row: Mapping[str, str]) -> str:
    return f"{row['state']}: {row['note']}" if row["note"] else row["state"]


def _rates(rates: Mapping[str, float] | None) -> str:
    """Formats the prefill rate and the duration of a decode step. Example: "850 tok/s, 10+1.5n ms"
    means that a decode step of n sequences takes 10 + 1.5 n ms."""
    if rates is None:
        return "-"
    step = f"{rates['decode_step_ms']:.3g}+{rates['decode_sequence_ms']:.2g}n ms"
    return f"{rates['prefill_tokens_per_s']:.0f} tok/s, {step}"


def _tier(tier: Mapping[str, Any]) -> str:
    """Formats how full a tier is, such as "host 40% of 1000". A tier that workers share has no size
    limit, so the number of blocks that this worker remembers is shown: "store 120 known"."""
    held = tier["blocks_held"]
    total = tier["blocks_total"]
    if tier["name"] in SHARED_TIERS:
        return f"{tier['name']} {held} known"
    return f"{tier['name']} {held / total if total else 0:.0%} of {total}"


def _pairs(worker: Mapping[str, Any]) -> list[str]:
    """Formats each peer with its transport and measured bandwidth."""
    pairs = worker.get("pairs", {})
    pair_texts = []
    for peer, way in sorted(worker["transports"].items()):
        speed = pairs.get(peer, {}).get("bytes_per_s")
        shown = _speed(speed) if speed else "(speed not known yet)"
        pair_texts.append(f"{peer} {way} {shown}")
    return pair_texts


def _speed(bytes_per_s: float) -> str:
    if bytes_per_s >= 1e9:
        return f"{bytes_per_s / 1e9:.2g} GB/s"
    return f"{bytes_per_s / 1e6:.0f} MB/s"

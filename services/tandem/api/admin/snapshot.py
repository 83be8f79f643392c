"""Snapshots of the cluster for the operators' page, and the changes from one snapshot to the next.

A snapshot has seven fields. `delta` compares two snapshots and lists the changes of each field:

  field     content of a snapshot                                  content of a delta
  head      one object: the router, the pools, the problems        the whole object, if changed
  workers   worker id -> a row of values (WORKER_COLUMNS)          new and changed rows
  requests  request id -> a record of a recent request: how long   new and changed records
            each stage took, and why its workers were chosen
  events    the latest events, the newest first                    the whole list, if changed
  answers   an operator's questions, answered in words             all answers, if one changed
  figures   current load and latencies: the numbers beside the     all figures, if one changed
            charts, in place of the last sample's values
  step      the values since the last sample, which are the last   all values, if one changed
            points of the charts

A delta also has the field `gone`: the ids of workers that left between the two snapshots.

A snapshot contains no prompt, no generated text and no API key.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from tandem.api.admin.answers import Service, answers_of, slowest_of, verdict, waiting_of
from tandem.api.admin.request_text import Request, longest_stage, prefill_choice
from tandem.common.config.router import RouterConfig
from tandem.net.store.cluster_event import ClusterEvent
from tandem.router.metrics.history import WorkerSums, sums_of
from tandem.router.metrics.latencies import Latency
from tandem.router.metrics.router import Metrics
from tandem.router.request.generator import Generator
from tandem.router.request.log import REQUESTS_MAX as REMEMBERED_MAX
from tandem.router.request.log import RUNNING, RequestRecord
from tandem.router.workers.cluster_view import ClusterView
from tandem.router.workers.known_worker import KnownWorker
from tandem.router.workers.rows import WorkerRow, effect_of, headline, problems_of, worker_rows

REQUESTS_MAX = 50
EVENTS_MAX = 50
_PAIRS_MAX = 64  # A worker's row lists the transports to at most this number of peers.
_MEMORY_LOW_SHARE = 0.05
_NEW = ("loading", "restarting")  # in these states, the record is that of the previous process
WORKER_COLUMNS = (
    *("pool", "role", "state", "note", "decoding", "in_prefill", "queued", "leases"),
    "queued_tokens",  # number of prompt tokens that wait to be computed, or are being computed
    *("kv_used_percent", "kv_cached_percent", "transports", "address", "host", "memory_is_low"),
    # for each KV cache tier: its name, the number of blocks held, the number of blocks in total
    "tiers",
    "ranks",  # number of processes that compute each step of the worker together
)
_REQUEST_FIELDS = (
    *("id", "kind", "created", "outcome", "error", "decode_worker", "first_decode_worker"),
    "stages_ms",
)
_OUTCOME_FIELDS = ("prefill_worker", "transport", "blocks_pulled", "moves", "ttft_ms", "e2e_ms")


@dataclass(frozen=True, slots=True)
class Snapshot:
    head: dict[str, Any] = field(default_factory=dict)
    workers: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    requests: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: list[ClusterEvent] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)
    figures: dict[str, float | None] = field(default_factory=dict)
    step: dict[str, float | None] = field(default_factory=dict)


def take_snapshot(
    config: RouterConfig,
    generator: Generator,
    view: ClusterView,
    pools: Mapping[str, Mapping[str, Any]],
    events: list[ClusterEvent],
    metrics: Metrics,
    queued_s: Mapping[str, float],
    models: Sequence[str],
    *,
    needs_key: bool,
    started_at: float,
    now: float,
) -> Snapshot:
    """Collects the cluster's state at `now`. `started_at` is the time when this router started.
    Both times are in seconds since the epoch. `needs_key` is True if the public listener serves
    only calls with an API key. `queued_s` is `History.queued_s`. `models` has the names of all
    models of the router."""
    rows = worker_rows(view.seen(), view.gone, pools, now, view.loading)
    reason = generator.not_ready_reason()
    wrong = view.cluster_problems().values()
    problems = problems_of(rows, pools, reason=reason, redis=view.redis_state, cluster=wrong)
    effect = effect_of(reason=reason, num_moved=view.events.num_moved, pools=pools)
    slo = config.autoscale
    first, following = metrics.first_tokens.last_minute(), metrics.next_tokens.last_minute()
    known = {worker.record.worker_id: worker for worker in view.known()}
    serving = serving_of(rows, known.values())
    sums = sums_of(serving, generator.requests.num_in_router())
    load = _load(sums)
    records = generator.requests.latest(REMEMBERED_MAX)
    requests = [record.as_dict() for record in records[:REQUESTS_MAX]]
    older = slowest_of(records[REQUESTS_MAX:], now)
    told = [*requests, older.as_dict()] if older else requests
    num_waiting = sums.num_in_prefill + sums.num_queued
    waiting = waiting_of(
        records, now, num_waiting, ttft_target_s=slo.ttft_s, ttft_token_s=slo.ttft_token_s
    )
    service = Service(first, following, slo.ttft_s, slo.itl_s, waiting)
    moved = view.events.moved_off()
    answers, bottleneck = answers_of(
        serving, rows, told, records, events, service, moved, queued_s, now
    )
    is_well = not problems and view.redis_state == "ok"
    lead = verdict(rows, service, bottleneck, is_well=is_well)
    line = headline(problems, pools, rows, effect)
    head = {
        "headline": lead if lead and is_well else f"{lead} {line}".strip(),
        "is_well": is_well,
        # "good": all is well; "wait": requests are served, but less well; "bad": not served
        "level": "bad" if reason else "wait" if lead or not is_well else "good",
        "router_id": config.router_id,
        "num_routers": pools.get("router", {}).get("running", 1),
        "version": metadata.version("tandem-llm"),
        "started_at": started_at,
        "cluster_id": config.cluster.cluster_id,
        "model": generator.served_name,
        "models": list(models),
        "group": config.group,
        "max_model_len": generator.max_model_len,
        "redis": view.redis_state,
        "is_ready": not reason,
        "public": {
            "host": config.host,
            "port": config.http_port,
            "scheme": "https" if config.tls.tls_cert else "http",
            "needs_key": needs_key,
        },
        "pools": {name: _pool(name, state, rows) for name, state in pools.items()},
        "autoscale": {
            "mode": config.autoscale.mode,
            "decisions": [{"pool": d.role, "size": d.to, "why": d.line} for d in view.decisions],
        },
    }
    return Snapshot(
        head,
        {
            row.worker_id: _row(row, None if row.state in _NEW else known.get(row.worker_id))
            for row in rows
        },
        {
            record.request_id: _request(request, requests, _phase(record))
            for record, request in zip(records, requests, strict=False)
        },
        events,
        answers,
        load | _latencies(first, following),
        load | _latencies(metrics.first_tokens.open_step(), metrics.next_tokens.open_step()),
    )


def serving_of(rows: Iterable[WorkerRow], known: Iterable[KnownWorker]) -> list[KnownWorker]:
    """Returns the workers that have requests: those that are ready or drain.

    The page sums over these workers. The record of a worker that was killed remains for a few
    seconds, but its row says that it does not serve.
    """
    serving = {row.worker_id for row in rows if row.state in ("ready", "draining")}
    return [worker for worker in known if worker.record.worker_id in serving]


def delta(before: Snapshot, after: Snapshot) -> dict[str, Any]:
    """Lists the changes from `before` to `after`. Fields without a change are left out."""
    changed: dict[str, Any] = {}
    if before.head != after.head:
        changed["head"] = after.head
    if rows := _changed(before.workers, after.workers):
        changed["workers"] = rows
    if gone := before.workers.keys() - after.workers.keys():
        changed["gone"] = sorted(gone)
    if requests := _changed(before.requests, after.requests):
        changed["requests"] = list(requests.values())
    for name in ("events", "answers", "figures", "step"):
        if getattr(before, name) != (value := getattr(after, name)):
            changed[name] = value
    return changed


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in after.items() if before.get(key) != value}


def _pool(name: str, state: Mapping[str, Any], rows: Iterable[WorkerRow]) -> dict[str, Any]:
    """Returns a pool's sizes. `others` counts its workers that are not ready, by their state."""
    states = Counter(row.state for row in rows if row.pool == name)
    running = state.get("running", state.get("registered"))
    return {
        "wanted": state.get("wanted", state.get("replicas")),
        "running": running,
        "ready": states.pop("ready", 0),
        "others": {state: n for state, n in states.items() if state != "stopped"},
    }


def _load(sums: WorkerSums) -> dict[str, float | None]:
    total = sums.blocks_total
    return {
        "decoding": sums.num_decoding,
        "in_prefill": sums.num_in_prefill,
        "queued": sums.num_queued,
        "kv_used_share": round(sums.blocks_used / total, 4) if total else None,
        "kv_cached_share": round(sums.blocks_cached / total, 4) if total else None,
    }


def _latencies(first: Latency, following: Latency) -> dict[str, float | None]:
    return {
        "ttft_p50_ms": first.median_ms,
        "ttft_max_ms": first.max_ms,
        "itl_p50_ms": following.median_ms,
        "itl_p95_ms": following.p95_ms,
    }


def _row(row: WorkerRow, worker: KnownWorker | None) -> tuple[Any, ...]:
    if worker is None:
        role = row.pool
        return (row.pool, role, row.state, row.note, 0, 0, 0, 0, 0, 0, 0, "", "", "", False, (), 1)
    record = worker.record
    load = worker.load
    cached = 100 * load.blocks_cached / load.blocks_total if load.blocks_total else 0.0
    is_low = record.memory_free_bytes < _MEMORY_LOW_SHARE * record.memory_total_bytes
    return (
        *(row.pool, record.role, row.state, row.note),
        *(load.num_decoding, load.num_in_prefill, worker.num_queued, load.num_leases),
        load.queued_tokens,
        *(round(100 * load.kv_use), round(cached)),
        _transports(rate.transport for rate in record.pairs.values()),
        *(record.address, record.host, is_low),
        tuple((tier.name, tier.blocks_held, tier.blocks_total) for tier in record.tiers),
        record.num_ranks,
    )


def _transports(transports: Iterable[str]) -> str:
    found = dict.fromkeys(sorted(t for t, _ in zip(transports, range(_PAIRS_MAX), strict=False)))
    return ", ".join(found)


def _phase(record: RequestRecord) -> str:
    return record.phase if record.outcome == RUNNING else ""


def _request(request: Request, latest: list[dict[str, Any]], phase: str) -> dict[str, Any]:
    usage = request["usage"]
    return {
        **{name: request[name] for name in (*_REQUEST_FIELDS, *_OUTCOME_FIELDS)},
        "phase": phase,
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["cached_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "longest": longest_stage(request, latest),
        "why": f"{request['placement_sentence']} {prefill_choice(request)}".strip(),
    }

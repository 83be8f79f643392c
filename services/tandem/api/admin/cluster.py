"""HTTP routes under `/v1/cluster`: cluster state, pool sizes, worker roles, drains, logs and index
audits."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from tandem.api.http.body import parse_object, read_body, read_json_object
from tandem.api.http.errors import JsonResponse
from tandem.api.http.guard import RESET_PATH, caller
from tandem.api.served_model import ServedModel
from tandem.common.config.cluster import pool_name, role_of
from tandem.common.config.router import RouterConfig
from tandem.common.perf_model.predict import queue_seconds
from tandem.common.perf_model.rates import WorkerRates
from tandem.errors import BadRequest
from tandem.net.observability.log_file import LogPosition
from tandem.prefix_index.audit import Differences
from tandem.router.request.generator import Generator
from tandem.router.scaling.controls import ClusterControls
from tandem.router.scaling.worker_log import read_own_log, read_worker_log
from tandem.router.workers.cluster_view import ClusterView
from tandem.router.workers.known_worker import KnownWorker
from tandem.router.workers.rows import effect_of, headline, problems_of, worker_rows

# These fields are copied unchanged into the cluster state. _KV_FIELDS are fields of `compatibility`
# in a worker's record. The other two lists are fields of the record itself.
_RECORD_FIELDS = (
    "worker_id",
    "role",
    "state",
    "num_ranks",
    "transports",
    "memory_free_bytes",
    "memory_total_bytes",
)
_PROCESS_FIELDS = ("address", "metrics_address", "host", "pid", "epoch", "started_at", "model")
_KV_FIELDS = ("compute_dtype", "numerics", "block_size")
# What each of several models has for itself in the cluster state.
_MODEL_FIELDS = ("model", "max_model_len", "headline", "router", "autoscale")


def add_cluster_routes(
    app: FastAPI,
    config: RouterConfig,
    served: Sequence[ServedModel],
) -> None:
    """Adds the routes for a router that serves these models."""
    control = ClusterControls(*(each.control for each in served))

    async def read_allowed(request: Request, *names: str) -> dict[str, Any]:
        body = await read_json_object(request, config)
        if unknown := set(body) - set(names):
            allowed = " and ".join(names)
            param = min(unknown)[:80]
            message = f"the body has the unknown field {param!r}; allowed: {allowed}"
            raise BadRequest(message, param=param)
        return body

    @app.get("/v1/cluster")
    async def state() -> Response:
        """Returns the state of the cluster: workers, pools, troubles and the autoscaler. With
        several models, `models` has what each has for itself."""
        states = {
            each.config.group: cluster_state(
                each.config, each.generator, each.view, await each.control.sizes.pools()
            )
            for each in served
        }
        return JsonResponse(_merged(states) if len(served) > 1 else states[config.group])

    @app.post("/v1/cluster", status_code=202)
    async def scale(request: Request) -> Response:
        """Sends new sizes to the owner of the pools. GET shows when they are reached."""
        body = await read_json_object(request, config)
        sizes = await control.scale(body, who=caller(request.scope))
        return JsonResponse({"wanted": sizes}, 202)

    @app.post("/v1/cluster/workers/{worker_id}/role")
    async def set_role(worker_id: str, request: Request) -> Response:
        """Moves a worker to the other pool, or to the named one, and answers once it has moved."""
        body = await read_allowed(request, "role")
        if not isinstance(role := body.get("role", ""), str):
            raise BadRequest("role must be prefill or decode", param="role")
        return JsonResponse(await control.set_role(worker_id, role, who=caller(request.scope)))

    @app.post("/v1/cluster/workers/{worker_id}/drain", status_code=202)
    async def drain(worker_id: str, request: Request) -> Response:
        """Drains a worker, within `deadline_s`. When the worker has left, GET does not list it. To
        drain the last decode worker, set `force`."""
        body = await read_allowed(request, "deadline_s", "force")
        if not isinstance(force := body.get("force", False), bool):
            raise BadRequest("force must be true or false", param="force")
        deadline_s = body.get("deadline_s", 0.0)
        who = caller(request.scope)
        await control.drain(worker_id, deadline_s, force=force, who=who)
        return JsonResponse({"draining": worker_id}, 202)

    @app.get("/v1/cluster/workers/{worker_id}/log")
    async def log(worker_id: str, request: Request) -> Response:
        """Returns a part of the log of a worker or of this router in `text`, and in `after` the
        position of its end. `?after=POSITION` reads on from there. An empty text: no more yet."""
        after = LogPosition.parse(request.query_params.get("after", ""))
        if worker_id == config.router_id:
            text, end = await read_own_log(after)
        else:
            text, end = await read_worker_log(control.of(worker_id), worker_id, after)
        return JsonResponse({"text": text.decode(errors="replace"), "after": str(end)})

    @app.post(RESET_PATH)
    async def reset_prefix_cache(request: Request) -> Response:
        """Drops the cached KV blocks that no request uses, at all workers or at `worker_id`."""
        # vLLM's clients send no body.
        body = parse_object(await read_body(request, config) or b"{}")
        if unknown := set(body) - {"worker_id"}:
            message = f"the body has the unknown field {min(unknown)[:80]!r}; allowed: worker_id"
            raise BadRequest(message, param="worker_id")
        if not isinstance(worker_id := body.get("worker_id", ""), str):
            raise BadRequest("worker_id must be a string, the id of a worker", param="worker_id")
        dropped = await control.reset_prefix_cache(worker_id, who=caller(request.scope))
        return JsonResponse({"dropped_blocks": dropped})

    @app.post("/v1/cluster/index/verify")
    async def verify(request: Request) -> Response:
        """Verifies a sample of entries, or every entry with `{"all": true}`."""
        body = await read_json_object(request, config)
        if not isinstance(body.get("all", False), bool) or body.keys() - {"all"}:
            raise BadRequest('the body must be {} or {"all": true}', param="all")
        workers: dict[str, Any] = {}
        for each in served:
            found = await each.audit.verify(everything=body.get("all", False))
            workers |= {name: _audited(differences) for name, differences in found.items()}
        return JsonResponse({"workers": workers})


def cluster_state(
    config: RouterConfig, generator: Generator, view: ClusterView, pools: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    workers = sorted(view.known(), key=lambda w: (w.record.role, w.record.worker_id))
    reason = generator.not_ready_reason()
    rows = worker_rows(view.seen(), view.gone, pools, time.time(), view.loading)
    wrong = view.cluster_problems().values()
    problems = problems_of(rows, pools, reason=reason, redis=view.redis_state, cluster=wrong)
    effect = effect_of(reason=reason, num_moved=view.events.num_moved, pools=pools)
    return {
        "headline": headline(problems, pools, rows, effect),
        "cluster_id": config.cluster.cluster_id,
        "model": generator.served_name,
        "max_model_len": generator.max_model_len,
        "router": {"id": config.router_id, "ready": not reason, "reason": reason},
        "redis": view.redis_state,
        "pools": pools,
        "known_workers": [asdict(row) for row in rows],
        "autoscale": {
            "mode": config.autoscale.mode,
            "decisions": [{"pool": d.role, "size": d.to, "why": d.line} for d in view.decisions],
        },
        "workers": [_worker(w, view) for w in workers],
    }


def _merged(states: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Merges the states of several models, by the groups of their pools. The pools of a further
    model have the name of its group before."""
    first = next(iter(states.values()))
    routers = [state["router"] for state in states.values()]
    return {
        **first,
        "router": next((each for each in routers if each["ready"]), first["router"]),
        "pools": {
            pool_name(group, role_of(name)): pool
            for group, state in states.items()
            for name, pool in state["pools"].items()
        },
        **{
            name: [
                {**row, "pool": pool_name(group, role_of(row["pool"]))}
                for group, state in states.items()
                for row in state[name]
            ]
            for name in ("known_workers", "workers")
        },
        "models": [
            {"group": group, **{name: state[name] for name in _MODEL_FIELDS}}
            for group, state in states.items()
        ],
    }


def _audited(found: Differences) -> dict[str, Any]:
    return {
        "checked": found.num_checked,
        "missing": found.missing,
        "stale": found.stale,
        "in_tree": found.in_tree,
        "error": found.error,
        "ok": not (found.any or found.error),
    }


def _worker(worker: KnownWorker, view: ClusterView) -> dict[str, Any]:
    record = worker.record
    load = worker.load
    client = worker.client
    return {
        "pool": record.pool or record.role,
        "compatible": view.is_compatible(record),
        "connected": client.is_up if client else None,
        **{name: getattr(record, name) for name in (*_RECORD_FIELDS, *_PROCESS_FIELDS)},
        **{name: getattr(record.compatibility, name) for name in _KV_FIELDS},
        "kv_use": load.kv_use,
        "load": {
            **msgspec.structs.asdict(load),
            "groups": list(map(msgspec.structs.asdict, load.groups)),
        },
        "tiers": list(map(msgspec.structs.asdict, record.tiers)),
        "requests_here": client.num_inflight if client else 0,
        "rates": _rates(record.rates),
        "pairs": {
            peer: {
                "bytes_per_s": pair.bytes_per_s if pair.is_known else None,
                "latency_ms": pair.latency_s * 1000,
            }
            for peer, pair in record.pairs.items()
        },
    }


def _rates(rates: WorkerRates) -> dict[str, float] | None:
    """Summarizes a worker's measured rates. Returns None until the worker has measured some."""
    if not rates.measured:
        return None
    step_s = queue_seconds(rates, rates.step_tokens)
    return {
        # prefill rate of a full step at the beginning of a prompt, where attention costs least
        "prefill_tokens_per_s": rates.step_tokens / step_s,
        "decode_step_ms": rates.decode.step_s * 1000,
        # time that each sequence in a decode step adds to `decode_step_ms`
        "decode_sequence_ms": rates.decode.sequence_s * 1000,
    }

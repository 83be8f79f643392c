"""The cluster for operators: `/v1/cluster` (state, and pool sizes to set) and `/`, a page of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import HTMLResponse, Response

from tandem.config import RouterConfig
from tandem.cost_model import WorkerRates
from tandem.errors import BadRequest
from tandem.router.api.http.body import read_json_object
from tandem.router.api.http.errors import JsonResponse
from tandem.router.api.http.guard import caller
from tandem.router.request.generator import Generator
from tandem.router.scaling.control import ClusterControl
from tandem.router.workers.cluster_view import ClusterView
from tandem.router.workers.known_worker import KnownWorker
from tandem.router.workers.pools import pool_states

_PAGE = Path(__file__).with_name("page.html")


def add_cluster_routes(
    app: FastAPI, config: RouterConfig, generator: Generator, view: ClusterView
) -> None:
    control = ClusterControl(config, view)

    @app.get("/v1/cluster")
    async def state() -> Response:
        return JsonResponse(cluster_state(config, generator, view))

    @app.post("/v1/cluster", status_code=202)
    async def scale(request: Request) -> Response:
        """Asks the pool controller for pool sizes; GET shows when they are reached."""
        body = await read_json_object(request, config)
        sizes = await control.scale(body, who=caller(request.scope))
        return JsonResponse({"wanted": sizes}, 202)

    @app.post("/v1/cluster/workers/{worker_id}/role")
    async def flip(worker_id: str, request: Request) -> Response:
        """Moves a worker to the other pool, or to the one that is named; answers when it is so."""
        body = await read_json_object(request, config)
        if unknown := set(body) - {"role"}:
            raise BadRequest(f"the body has {unknown}; allowed is role", param=unknown.pop()[:80])
        if not isinstance(role := body.get("role", ""), str):
            raise BadRequest("role must be prefill or decode", param="role")
        return JsonResponse(await control.flip(worker_id, role, who=caller(request.scope)))

    @app.post("/v1/cluster/workers/{worker_id}/drain", status_code=202)
    async def drain(worker_id: str, request: Request) -> Response:
        """Has a worker leave in order; it is gone from GET when it has. `deadline_s`: at most."""
        body = await read_json_object(request, config)
        if unknown := set(body) - {"deadline_s"}:
            message = f"the body has {unknown}; allowed is deadline_s"
            raise BadRequest(message, param=unknown.pop()[:80])
        deadline_s = body.get("deadline_s", 0.0)
        await control.drain(worker_id, deadline_s, who=caller(request.scope))
        return JsonResponse({"draining": worker_id}, 202)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(_PAGE.read_text(encoding="utf-8"))


def cluster_state(config: RouterConfig, generator: Generator, view: ClusterView) -> dict[str, Any]:
    workers = sorted(view.known(), key=lambda w: (w.record.role, w.record.worker_id))
    reason = generator.not_ready_reason()
    return {
        "cluster_id": config.cluster.cluster_id,
        "model": generator.served_name,
        "max_model_len": generator.max_model_len,
        "router": {"id": config.router_id, "ready": not reason, "reason": reason},
        "redis": view.redis_state,
        "pools": pool_states([w.record for w in workers], view.pools_json),
        "autoscale": {
            "mode": config.autoscale.mode,
            "decisions": [{"pool": d.role, "size": d.to, "why": d.line} for d in view.decisions],
        },
        "workers": [_worker(w, view) for w in workers],
    }


def _worker(worker: KnownWorker, view: ClusterView) -> dict[str, Any]:
    record, load = worker.record, worker.load
    client = worker.client
    total = load.blocks_total
    return {
        "worker_id": record.worker_id,
        "role": record.role,
        "pool": record.pool or record.role,
        "state": record.state,
        "compatible": view.is_compatible(record),
        "connected": client.is_up if client else None,
        "address": record.address,
        "metrics_address": record.metrics_address,
        "host": record.host,
        "pid": record.pid,
        "epoch": record.epoch,
        "started_at": record.started_at,
        "model": record.model,
        "compute_dtype": record.contract.compute_dtype,
        "numerics": record.contract.numerics,
        "block_size": record.contract.block_size,
        "kv_use": load.blocks_used / total if total else 0.0,
        "load": {name: getattr(load, name) for name in load.__struct_fields__},
        "memory_free_bytes": record.memory_free_bytes,
        "memory_total_bytes": record.memory_total_bytes,
        "requests_here": client.num_inflight if client else 0,
        "transports": record.transports,
        "rates": _rates(record.rates),
        "pairs": {
            peer: {"bytes_per_s": pair.bytes_per_s, "latency_ms": pair.latency_s * 1000}
            for peer, pair in record.pairs.items()
        },
    }


def _rates(rates: WorkerRates) -> dict[str, float] | None:
    """What the worker measured of itself; None while it has measured nothing."""
    if not rates.measured:
        return None
    step_s = rates.prefill.seconds(rates.step_tokens, 0, rates.step_tokens)
    return {
        "prefill_tokens_per_s": rates.step_tokens / step_s,  # of a full step at a prompt's start
        "decode_step_ms": rates.decode.step_s * 1000,
        "decode_sequence_ms": rates.decode.sequence_s * 1000,  # more for each in the step
    }

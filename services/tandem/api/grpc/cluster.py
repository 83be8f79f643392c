"""The gRPC API `tandem.v1.Cluster` for operators. This module only translates between gRPC messages
and the router's functions, as `api/admin/cluster` does for HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from tandem.api.grpc.access import CallGuard, caller
from tandem.common.config.cluster import pool_name, role_of
from tandem.net.rpc.tandem.v1 import cluster_pb2 as pb
from tandem.net.security.audit_trail import Caller
from tandem.router.scaling.adapters import AdapterControl
from tandem.router.scaling.controls import ClusterControls

SERVICE = pb.DESCRIPTOR.services_by_name["Cluster"].full_name
_Answer = Callable[[Any, Caller], Awaitable[Any]]


class GrpcCluster:
    """Serves the cluster API. The caller adds `handlers()` to a gRPC server."""

    def __init__(
        self, control: ClusterControls, adapters: AdapterControl, guard: CallGuard
    ) -> None:
        self._guard = guard
        self._control = control
        self._adapters = adapters

    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        methods: dict[str, tuple[_Answer, Any]] = {
            "GetCluster": (self._get_cluster, pb.GetClusterRequest),
            "ScalePools": (self._scale_pools, pb.ScalePoolsRequest),
            "SetWorkerRole": (self._set_worker_role, pb.SetWorkerRoleRequest),
            # FlipWorker is an alias of SetWorkerRole.
            "FlipWorker": (self._set_worker_role, pb.SetWorkerRoleRequest),
            "DrainWorker": (self._drain_worker, pb.DrainWorkerRequest),
            "ResetPrefixCache": (self._reset_prefix_cache, pb.ResetWorkersCacheRequest),
            "LoadLoraAdapter": (self._load_adapter, pb.LoadLoraAdapterRequest),
            "UnloadLoraAdapter": (self._unload_adapter, pb.UnloadLoraAdapterRequest),
        }
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {name: self._handler(name, *method) for name, method in methods.items()},
        )

    async def _get_cluster(
        self, request: pb.GetClusterRequest, who: Caller
    ) -> pb.GetClusterResponse:
        known = [worker for control in self._control for worker in control.view.known()]
        records = sorted(((w.record, w.load) for w in known), key=lambda r: r[0].worker_id)
        fields = ("wanted", "running", "ready", "serving")
        pools = {
            pool_name(control.group, role_of(role)): {"wanted": state.get("replicas", 0), **state}
            for control in self._control
            for role, state in (await control.sizes.pools()).items()
        }
        return pb.GetClusterResponse(
            pools=[
                pb.PoolState(name=name, **{f: state.get(f, 0) for f in fields})
                for name, state in pools.items()
            ],
            workers=[
                pb.WorkerState(
                    worker_id=record.worker_id,
                    role=record.role,
                    pool=pool_name(record.group, role_of(record.pool or record.role)),
                    state=record.state,
                    num_running=load.num_running,
                    num_waiting=load.num_waiting,
                    num_leases=load.num_leases,
                    kv_use=load.kv_use,
                    num_ranks=record.num_ranks,
                )
                for record, load in records
            ],
            decisions=[
                pb.AutoscaleDecision(pool=pool_name(control.group, d.role), size=d.to, why=d.line)
                for control in self._control
                for d in control.view.decisions
            ],
        )

    async def _scale_pools(
        self, request: pb.ScalePoolsRequest, who: Caller
    ) -> pb.ScalePoolsResponse:
        return pb.ScalePoolsResponse(wanted=await self._control.scale(dict(request.sizes), who=who))

    async def _set_worker_role(
        self, request: pb.SetWorkerRoleRequest, who: Caller
    ) -> pb.SetWorkerRoleResponse:
        done = await self._control.set_role(request.worker_id, request.role, who=who)
        return pb.SetWorkerRoleResponse(
            worker_id=done.worker_id, role=done.role, took_s=done.took_s
        )

    async def _drain_worker(
        self, request: pb.DrainWorkerRequest, who: Caller
    ) -> pb.DrainWorkerResponse:
        await self._control.drain(
            request.worker_id, request.deadline_s, force=request.force, who=who
        )
        return pb.DrainWorkerResponse()

    async def _reset_prefix_cache(
        self, request: pb.ResetWorkersCacheRequest, who: Caller
    ) -> pb.ResetWorkersCacheResponse:
        dropped = await self._control.reset_prefix_cache(request.worker_id, who=who)
        return pb.ResetWorkersCacheResponse(dropped_blocks=dropped)

    async def _load_adapter(
        self, request: pb.LoadLoraAdapterRequest, who: Caller
    ) -> pb.LoadLoraAdapterResponse:
        loaded = await self._adapters.load(
            request.lora_name,
            request.lora_path,
            in_place=request.load_inplace,
            who=who,
        )
        return pb.LoadLoraAdapterResponse(digest=loaded.adapter.digest, refused=loaded.refused)

    async def _unload_adapter(
        self, request: pb.UnloadLoraAdapterRequest, who: Caller
    ) -> pb.UnloadLoraAdapterResponse:
        await self._adapters.unload(request.lora_name, who=who)
        return pb.UnloadLoraAdapterResponse()

    def _handler(
        self, method: str, answer: _Answer, request_type: Any
    ) -> grpc.RpcMethodHandler[Any, Any]:
        async def serve(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            key = await self._guard.check("operator", context, method)
            return await answer(request, caller(context, key))

        return grpc.unary_unary_rpc_method_handler(
            serve,
            request_deserializer=request_type.FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )

"""The gRPC API `tandem.v1.Cluster` for operators. It only translates, like `api/http/cluster`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from tandem.config.router import RouterConfig
from tandem.router.api.grpc.access import CallGuard, caller
from tandem.router.scaling.control import ClusterControl
from tandem.router.workers.cluster_view import ClusterView
from tandem.router.workers.pools import pool_states
from tandem.rpc.tandem.v1 import cluster_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["Cluster"].full_name


class GrpcCluster:
    """Serves the cluster API; add its `handlers` to a gRPC server."""

    def __init__(self, config: RouterConfig, view: ClusterView, guard: CallGuard) -> None:
        self._view = view
        self._guard = guard
        self._control = ClusterControl(config, view)

    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "GetCluster": self._handler(self._get_cluster, pb.GetClusterRequest),
                "ScalePools": self._handler(self._scale_pools, pb.ScalePoolsRequest),
                "SetWorkerRole": self._handler(self._set_worker_role, pb.SetWorkerRoleRequest),
                # The old name of SetWorkerRole.
                "FlipWorker": self._handler(self._set_worker_role, pb.SetWorkerRoleRequest),
                "DrainWorker": self._handler(self._drain_worker, pb.DrainWorkerRequest),
            },
        )

    async def _get_cluster(self, request: pb.GetClusterRequest, who: str) -> pb.GetClusterResponse:
        records = sorted(
            ((w.record, w.load) for w in self._view.known()), key=lambda r: r[0].worker_id
        )
        fields = ("wanted", "running", "ready", "serving")
        pools = pool_states([record for record, _ in records], self._view.pools_json)
        return pb.GetClusterResponse(
            pools=[
                pb.PoolState(name=name, **{f: state.get(f, 0) for f in fields})
                for name, state in pools.items()
            ],
            workers=[
                pb.WorkerState(
                    worker_id=record.worker_id,
                    role=record.role,
                    pool=record.pool or record.role,
                    state=record.state,
                    num_running=load.num_running,
                    num_waiting=load.num_waiting,
                    num_leases=load.num_leases,
                    kv_use=load.blocks_used / load.blocks_total if load.blocks_total else 0.0,
                )
                for record, load in records
            ],
            decisions=[
                pb.AutoscaleDecision(pool=d.role, size=d.to, why=d.line)
                for d in self._view.decisions
            ],
        )

    async def _scale_pools(self, request: pb.ScalePoolsRequest, who: str) -> pb.ScalePoolsResponse:
        return pb.ScalePoolsResponse(wanted=await self._control.scale(dict(request.sizes), who=who))

    async def _set_worker_role(
        self, request: pb.SetWorkerRoleRequest, who: str
    ) -> pb.SetWorkerRoleResponse:
        done = await self._control.set_role(request.worker_id, request.role, who=who)
        return pb.SetWorkerRoleResponse(
            worker_id=done.worker_id, role=done.role, took_s=done.took_s
        )

    async def _drain_worker(
        self, request: pb.DrainWorkerRequest, who: str
    ) -> pb.DrainWorkerResponse:
        await self._control.drain(request.worker_id, request.deadline_s, who=who)
        return pb.DrainWorkerResponse()

    def _handler(
        self, answer: Callable[[Any, str], Awaitable[Any]], request_type: Any
    ) -> grpc.RpcMethodHandler[Any, Any]:
        async def serve(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            await self._guard.check("operator", context)
            return await answer(request, caller(context))

        return grpc.unary_unary_rpc_method_handler(
            serve,
            request_deserializer=request_type.FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )

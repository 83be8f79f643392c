"""The gRPC service of an encode worker (proto/tandem/v1/worker.proto). Calls that concern KV are
unimplemented."""

from collections.abc import AsyncIterator
from typing import Any

from tandem.errors import NotNow
from tandem.net.rpc.convert import to_message
from tandem.net.rpc.failures import abort
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.worker_pb2_grpc import WorkerServicer
from tandem.worker.encode.worker import EncodeWorker
from tandem.worker.lifecycle.worker_log import read_log


class EncodeServicer(WorkerServicer):
    """Converts gRPC messages and calls the worker. Has no state of its own."""

    def __init__(self, worker: EncodeWorker) -> None:
        self._worker = worker

    async def Encode(
        self, request: pb.EncodeRequest, context: Any
    ) -> AsyncIterator[pb.EncodedImage]:
        async for piece in self._worker.service.serve(request, context):
            yield piece

    async def ReadLog(self, request: pb.ReadLogRequest, context: Any) -> pb.ReadLogResponse:
        return await read_log(request, context)

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: Any
    ) -> pb.ResetPrefixCacheResponse:
        self._worker.service.forget()
        return pb.ResetPrefixCacheResponse()

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        self._worker.stop(request.deadline_s or self._worker.config.drain_deadline_s)
        return pb.DrainResponse()

    async def SetRole(self, request: pb.SetRoleRequest, context: Any) -> pb.SetRoleResponse:
        await abort(context, NotNow("an encode worker cannot change its role"))

    async def GetState(self, request: pb.GetStateRequest, context: Any) -> pb.GetStateResponse:
        return pb.GetStateResponse(
            load=to_message(pb.WorkerLoad, self._worker.load()),
            worker_id=self._worker.config.worker_id,
            epoch=self._worker.epoch,
            draining=self._worker.state == "draining",
            integrity_ok=True,
        )

"""What callers see, and the log says, when a unary call to a worker fails."""

from __future__ import annotations

import logging
from typing import Any

import grpc
import grpc.aio
import pytest

from services.errors import QueueFull, TandemError, WorkerLost
from services.rpc.failures import FailureInterceptor
from services.rpc.tandem.v1 import worker_pb2 as pb
from services.rpc.tandem.v1.worker_pb2_grpc import (
    WorkerServicer,
    WorkerStub,
    add_WorkerServicer_to_server,
)


class _Failing(WorkerServicer):
    def __init__(self, error: TandemError) -> None:
        self._error = error

    async def ListBlocks(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise self._error


async def _fails_with(error: TandemError) -> grpc.aio.AioRpcError:
    server = grpc.aio.server(interceptors=[FailureInterceptor()])
    add_WorkerServicer_to_server(_Failing(error), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await WorkerStub(channel).ListBlocks(pb.ListBlocksRequest(end_bucket=1))
        return raised.value
    finally:
        await server.stop(0)


async def test_a_lost_engine_is_unavailable_and_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        error = await _fails_with(WorkerLost("the engine ended"))
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "the engine ended")
    assert dict(error.trailing_metadata() or ())["tandem-code"] == "worker_lost"
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


async def test_a_wait_travels_along() -> None:
    error = await _fails_with(QueueFull("full", retry_after_s=1.5))
    trailers = dict(error.trailing_metadata() or ())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (trailers["retry-after"], trailers["grpc-retry-pushback-ms"]) == ("2", "2000")

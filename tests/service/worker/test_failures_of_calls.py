"""A failed unary call to a worker, as its caller sees it and as the log has it."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from tandem.errors import QueueFull, WorkerLost
from tandem.net.rpc.failures import FailureInterceptor, quiet_peer_faults
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.worker_pb2_grpc import (
    WorkerServicer,
    WorkerStub,
    add_WorkerServicer_to_server,
)


class _Failing(WorkerServicer):
    def __init__(self, error: Exception) -> None:
        self._error = error

    async def ListBlocks(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise self._error


async def _fails_with(error: Exception) -> grpc.aio.AioRpcError:
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


async def test_an_engine_that_does_not_answer_is_said_to_be_late(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = await _fails_with(TimeoutError())
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "ListBlocks" in (error.details() or "")
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


async def test_a_wait_travels_along() -> None:
    error = await _fails_with(QueueFull("full", retry_after_s=1.5))
    trailers = dict(error.trailing_metadata() or ())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (trailers["retry-after"], trailers["grpc-retry-pushback-ms"]) == ("2", "2000")


class _Endless(WorkerServicer):
    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def Probe(self, request: Any, context: Any) -> AsyncIterator[pb.BlockBytes]:  # noqa: N802
        try:
            while True:
                yield pb.BlockBytes(data=bytes(1 << 20))
        finally:
            self.ended.set()


_CONSUMER = """
import grpc, sys
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.worker_pb2_grpc import WorkerStub
channel = grpc.insecure_channel(sys.argv[1], [("grpc.max_receive_message_length", -1)])
for _ in WorkerStub(channel).Probe(pb.ProbeRequest()):
    print("read", flush=True)
"""


async def test_a_consumer_that_is_killed_is_no_error_of_the_producer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    quiet_peer_faults()
    producer = _Endless()
    server = grpc.aio.server()
    add_WorkerServicer_to_server(producer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        consumer = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _CONSUMER, f"127.0.0.1:{port}"), stdout=subprocess.PIPE
        )
        assert consumer.stdout is not None
        await consumer.stdout.readline()
        consumer.kill()
        await consumer.wait()
        async with asyncio.timeout(20):
            await producer.ended.wait()
    finally:
        await server.stop(0)
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_a_bug_in_a_handler_stays_an_error(caplog: pytest.LogCaptureFixture) -> None:
    quiet_peer_faults()
    try:
        raise ValueError("a bug")
    except ValueError:
        logging.getLogger("grpc._cython.cygrpc").exception("raised")
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert caplog.records[0].exc_info

"""Malformed messages to both gRPC services get a status that names the client's mistake."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from tandem.net.rpc.tandem.v1 import cluster_pb2 as pb
from tandem.net.rpc.tandem.v1.cluster_pb2_grpc import ClusterStub
from tests.service.router.conftest import BODY_BYTES_MAX, RunningRouter

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

INFERENCE = ["GetRequest", "ListModels"]
CLUSTER = [
    "GetCluster",
    "ScalePools",
    "SetWorkerRole",
    "FlipWorker",
    "DrainWorker",
    "ResetPrefixCache",
]
METHODS = [
    *(f"/tandem.v1.Inference/{name}" for name in INFERENCE),
    *(f"/tandem.v1.Cluster/{name}" for name in CLUSTER),
    "/grpc.health.v1.Health/Check",
]
STREAMS = [  # gRPC's own services, whose messages gRPC parses itself
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
]
NO_MESSAGE = {
    "broken tag": b"\xff",
    "truncated field": b"\x0a\x7fx",
    "wire type 7": b"\x0f",
    "group without an end": b"\x0b" * 1000,
    "length of 2^63": b"\x0a" + b"\xff" * 8 + b"\x7f",
}
# Field 1 is a string; in ScalePools it is a map entry with a string key.
NO_UTF8 = {
    "SetWorkerRole": b"\x0a\x02\xff\xfe",
    "DrainWorker": b"\x0a\x02\xc3\x28",
    "ScalePools": b"\x0a\x06\x0a\x02\xff\xfe\x10\x01",
}


@pytest_asyncio.fixture(loop_scope="module")
async def channel(
    router: RunningRouter, request: pytest.FixtureRequest
) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to the admin port, or to the public port for tests of an inference method."""
    parameters = getattr(request.node, "callspec", None)
    is_public = "Inference" in (parameters.params.get("method", "") if parameters else "")
    port = router.router.grpc_port if is_public else router.router.admin.grpc_port
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel


async def refusal(channel: grpc.aio.Channel, method: str, body: bytes) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await channel.unary_unary(method)(body, timeout=20)
    return raised.value


def assert_no_traceback(caplog: pytest.LogCaptureFixture, error: grpc.aio.AioRpcError) -> None:
    assert "Traceback" not in caplog.text + (error.details() or "")
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


@pytest.mark.parametrize("body", NO_MESSAGE.values(), ids=NO_MESSAGE)
@pytest.mark.parametrize("method", METHODS)
async def test_bytes_that_are_no_message(
    channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture, method: str, body: bytes
) -> None:
    error = await refusal(channel, method, body)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "UTF-8" in (error.details() or "")
    assert_no_traceback(caplog, error)


@pytest.mark.parametrize("method", STREAMS)
async def test_bytes_that_are_no_message_on_a_stream(
    channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in channel.stream_stream(method)(iter([b"\xff"]), timeout=20):
            pass
    assert_no_traceback(caplog, raised.value)


@pytest.mark.parametrize("method", NO_UTF8)
async def test_a_string_that_is_no_utf8(
    channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    error = await refusal(channel, f"/tandem.v1.Cluster/{method}", NO_UTF8[method])
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "UTF-8" in (error.details() or "")
    assert_no_traceback(caplog, error)


@pytest.mark.parametrize("size", [65, 1 << 31, 0xFFFF_FFFF])
async def test_a_huge_pool_is_refused(
    channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    body = pb.ScalePoolsRequest(sizes={"decode": size}).SerializeToString()
    error = await refusal(channel, "/tandem.v1.Cluster/ScalePools", body)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert_no_traceback(caplog, error)


@pytest.mark.parametrize("deadline_s", [float("nan"), float("inf"), -1.0, 1e308])
async def test_a_deadline_that_is_no_time_is_refused(
    channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture, deadline_s: float
) -> None:
    request = pb.DrainWorkerRequest(worker_id="decode-0", deadline_s=deadline_s)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await ClusterStub(channel).DrainWorker(request, timeout=20)
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "deadline_s" in (raised.value.details() or "")
    assert_no_traceback(caplog, raised.value)


async def test_a_message_over_the_bound_is_not_read(channel: grpc.aio.Channel) -> None:
    error = await refusal(channel, "/tandem.v1.Cluster/ScalePools", b"x" * (BODY_BYTES_MAX + 1))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_message_with_many_unknown_fields_is_answered(channel: grpc.aio.Channel) -> None:
    """Unknown fields are allowed by protobuf; the message size limits their number."""
    body = b"\xf8\x07\x01" * (BODY_BYTES_MAX // 4)
    answer = await channel.unary_unary("/tandem.v1.Cluster/GetCluster")(body, timeout=20)
    assert pb.GetClusterResponse.FromString(answer).workers

"""A client that takes nothing of its answer is cut, and what it held is free; a slow one is not."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import grpc
import grpc.aio
import pytest

from tandem.net.rpc.tandem.v1 import inference_pb2 as pb
from tandem.net.rpc.tandem.v1 import worker_pb2
from tandem.net.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tests.harness.scripted_worker import Say, update
from tests.service.router.conftest import RunningRouter, eventually

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

SEND_DEADLINE_S = 3.0
ROUTER = {"send_deadline_s": SEND_DEADLINE_S}
NUM_TOKENS = 1900
# Windows that the answer fills many times.
RECEIVE_BYTES = 8192
SMALL_WINDOW = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 65_535),
]


async def says_much_and_hangs(submit: worker_pb2.SubmitSequence, say: Say) -> None:
    """Says long tokens and does not end, as a long answer does not while its client is away."""
    for _ in range(NUM_TOKENS - 1):
        say(update(submit, [LONG_TOKEN[0]]))
        await asyncio.sleep(0)


async def says_much(submit: worker_pb2.SubmitSequence, say: Say) -> None:
    await says_much_and_hangs(submit, say)
    say(update(submit, [LONG_TOKEN[0]], "length"))


LONG_TOKEN: list[int] = []


@pytest.fixture(autouse=True)
def long_token(router: RunningRouter) -> None:
    LONG_TOKEN[:] = router.tokenizer.encode(" " * 64)
    assert len(LONG_TOKEN) == 1


async def open_stream(router: RunningRouter) -> socket.socket:
    """Sends a streaming request over a socket with a small receive buffer; reads nothing."""
    sock = socket.socket()
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", router.router.http_port))
    body = json.dumps({"prompt": [5, 6], "max_tokens": NUM_TOKENS, "stream": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    await loop.sock_sendall(sock, head.encode() + body)
    return sock


async def is_cut(router: RunningRouter, num_cancelled: float) -> None:
    """Waits until the worker was told, and the request has ended as cancelled."""
    await eventually(lambda: len(router.cancelled) == 1, deadline_s=30)
    await eventually(lambda: router.num_running() == 0)
    assert router.outcomes()["cancelled"] == num_cancelled + 1
    assert len(router.submitted) == 1


async def read_all(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_an_http_client_that_reads_nothing_is_cut(router: RunningRouter) -> None:
    router.script(says_much_and_hangs)
    before = router.outcomes().get("cancelled", 0)
    sock = await open_stream(router)
    try:
        await is_cut(router, before)
    finally:
        sock.close()


async def test_a_slow_http_client_gets_its_whole_answer(router: RunningRouter) -> None:
    """It needs longer than the deadline for the answer, and never as long for a part of it."""
    router.script(says_much)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    sock = await open_stream(router)
    answer = bytearray()
    try:
        while part := await loop.sock_recv(sock, RECEIVE_BYTES):
            answer += part
            await asyncio.sleep(0.1)
    finally:
        sock.close()
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert loop.time() - began_s > 1.4 * SEND_DEADLINE_S
    assert not router.cancelled


async def test_a_grpc_client_that_reads_nothing_is_cut(router: RunningRouter) -> None:
    router.script(says_much_and_hangs)
    before = router.outcomes().get("cancelled", 0)
    address = f"127.0.0.1:{router.router.grpc_port}"
    async with grpc.aio.insecure_channel(address, options=SMALL_WINDOW) as channel:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6]), max_tokens=NUM_TOKENS)
        call = InferenceStub(channel).Generate(request)
        await call.read()
        await is_cut(router, before)
        # When it reads on, it finds what had been sent, and then why there is no more.
        with pytest.raises(grpc.aio.AioRpcError, match="read no message for 3 s") as cut:
            await read_all(call)
        assert cut.value.code() is grpc.StatusCode.CANCELLED


async def test_a_slow_grpc_client_gets_its_whole_answer(router: RunningRouter) -> None:
    router.script(says_much)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    address = f"127.0.0.1:{router.router.grpc_port}"
    num_tokens = 0
    async with grpc.aio.insecure_channel(address, options=SMALL_WINDOW) as channel:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6]), max_tokens=NUM_TOKENS)
        async for message in InferenceStub(channel).Generate(request):
            num_tokens += len(message.token_ids)
            await asyncio.sleep(0.0025 * len(message.token_ids))
    assert num_tokens == NUM_TOKENS
    assert loop.time() - began_s > 1.4 * SEND_DEADLINE_S
    assert not router.cancelled

"""Clients that leave at every moment: the router counts an outcome for each request that it heard.

A request that the router has begun to follow has a record, by the name that its client gave it. One
whose client left before has neither a record nor an outcome.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import grpc.aio
import msgspec
import pytest

from tandem.net.rpc.tandem.v1 import inference_pb2 as pb
from tandem.net.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tests.chaos.load import HttpApi
from tests.harness.scripted_worker import silent
from tests.service.router.conftest import RunningRouter, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

TURNS = 40  # of the event loop: after as many a request is at its worker
BODY = {"prompt": [1, 2, 3], "max_tokens": 4, "stream": True}


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def leave_over_http(router: RunningRouter, name: str, num_turns: int) -> None:
    """Sends a whole request at once, and closes the connection so many turns later."""
    body = msgspec.json.encode(BODY)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nX-Request-Id: {name}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", router.router.http_port)) as client:
        client.sendall(head.encode() + body)
        await turns(num_turns)


async def leave_over_grpc(router: RunningRouter, name: str, num_turns: int) -> None:
    target = f"127.0.0.1:{router.router.grpc_port}"
    async with grpc.aio.insecure_channel(target) as channel:
        await channel.channel_ready()
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), max_tokens=4)
        call = InferenceStub(channel).Generate(request, metadata=(("x-request-id", name),))
        await turns(num_turns)
        call.cancel()


@pytest.mark.parametrize("leave", [leave_over_http, leave_over_grpc])
async def test_each_request_that_was_heard_is_counted_whenever_its_client_leaves(
    router: RunningRouter, leave: Callable[[RunningRouter, str, int], Awaitable[None]]
) -> None:
    router.script(silent)
    num_before = sum(router.outcomes().values())
    names = [f"{leave.__name__}.{num_turns}" for num_turns in range(TURNS)]
    for num_turns, name in enumerate(names):
        await leave(router, name, num_turns)
    last = f"{leave.__name__}.last"
    await leave(router, last, 500 * TURNS)

    async def num_heard() -> int:
        return sum([await HttpApi(router.http).was_heard(name) for name in [*names, last]])

    assert await HttpApi(router.http).was_heard(last), "one that stays so long is heard"
    await eventually(lambda: not router.num_running())
    assert sum(router.outcomes().values()) - num_before == await num_heard()

"""Incomplete bodies are limited in total and by address, over HTTP and at an endpoint picker."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tandem.errors import BodiesFull, TooManyRequests
from tandem.net.security import body_budget
from tandem.net.security.body_budget import BodyBudget
from tests.harness.scripted_worker import saying
from tests.harness.waiting import eventually
from tests.security.test_slow_bodies import changing_paths
from tests.service.router.conftest import BODY_BYTES_MAX, RunningRouter

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

MIB = 1 << 20
ROUTER = {"unparsed_bytes_max": 8 * MIB}
BUDGET_OF_ADDRESS = 4 * MIB
PIECE = b" " * (BODY_BYTES_MAX - 10)


async def unfinished(
    port: int, path: str, *, chunked: bool = False
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends a body without its last bytes."""
    framing = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % BODY_BYTES_MAX
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    body = b"%x\r\n%b\r\n" % (len(PIECE), PIECE) if chunked else PIECE
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + framing + b"\r\n\r\n" + body)
    with contextlib.suppress(ConnectionError):
        await writer.drain()
    return reader, writer


@pytest.fixture
def bodies(router: RunningRouter) -> BodyBudget:
    return router.router._access.bodies


@pytest.mark.parametrize("chunked", [False, True])
async def test_unfinished_bodies_of_an_address_have_a_bound_on_every_route(
    router: RunningRouter, bodies: BodyBudget, chunked: bool
) -> None:
    own = router.router
    calls = [(own.http_port, path) for path in await changing_paths(router.http)]
    calls += [(own.admin.http_port, path) for path in await changing_paths(router.admin)]
    calls *= 2
    opened = await asyncio.gather(*(unfinished(*call, chunked=chunked) for call in calls))
    answers = [asyncio.create_task(reader.readline()) for reader, _ in opened]
    refused = len(calls) - BUDGET_OF_ADDRESS // len(PIECE)
    await eventually(lambda: sum(answer.done() for answer in answers) >= refused)
    assert 3 * MIB < bodies.num_bytes <= BUDGET_OF_ADDRESS
    statuses = {answer.result()[:12] for answer in answers if answer.done()}
    assert statuses <= {b"HTTP/1.1 429", b"HTTP/1.1 503"}
    # A short request of the same address is still read.
    router.script(saying([5, 6, 7], finish_reason="length"))
    assert (await router.http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
    for answer, (_, writer) in zip(answers, opened, strict=True):
        answer.cancel()
        writer.close()
    await eventually(lambda: bodies.num_bytes == 0)


async def test_each_end_of_a_body_releases_it(router: RunningRouter, bodies: BodyBudget) -> None:
    router.script(saying([5, 6, 7], finish_reason="length"))
    large = " " * 500_000
    for content, status in (
        (f'{{"prompt": "x"}}{large}', 200),
        (f"{large}no JSON", 400),
        (large * 3, 413),
    ):
        answer = await router.http.post(
            "/v1/completions", content=content, headers={"content-type": "application/json"}
        )
        assert answer.status_code == status
        assert bodies.num_bytes == 0
    _, writer = await unfinished(router.router.http_port, "/v1/completions")
    await eventually(lambda: bodies.num_bytes > MIB // 2)
    writer.transport.abort()
    await eventually(lambda: bodies.num_bytes == 0)


async def test_silent_bodies_give_way_to_a_large_one(
    router: RunningRouter, bodies: BodyBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_budget, "_SILENT_S", 0.0)
    router.script(saying([5, 6, 7], finish_reason="length"))
    opened = [await unfinished(router.router.http_port, "/v1/completions") for _ in range(4)]
    await eventually(lambda: bodies.num_bytes > 3 * MIB)
    content = '{"prompt": "x"}' + " " * 900_000
    answer = await router.http.post(
        "/v1/completions", content=content, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 200
    first = await opened[0][0].readuntil(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 1" in first
    for _, writer in opened:
        writer.close()
    await eventually(lambda: bodies.num_bytes == 0)


async def test_the_address_with_the_most_bytes_gives_way() -> None:
    budget = BodyBudget(100, 80)
    revoked = list[str]()
    with contextlib.ExitStack() as stack:

        def body(address: str, name: str) -> body_budget.Body:
            return stack.enter_context(budget.body(address, lambda: revoked.append(name)))

        first, second, other = body("a", "first"), body("a", "second"), body("b", "other")
        first.take(40)
        second.take(40)
        with pytest.raises(TooManyRequests):
            second.take(1)
        other.take(30)
        assert revoked == ["first"]
        with pytest.raises(BodiesFull):
            first.take(1)
        assert budget.num_bytes == 70
        other.take(30)
        with pytest.raises(BodiesFull):
            other.take(10)
        assert budget.num_bytes == 100
    assert budget.num_bytes == 0

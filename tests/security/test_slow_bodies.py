"""A body that arrives too slowly gets a 408 on every route that reads one."""

from __future__ import annotations

import asyncio
import contextlib
import json

import httpx
import pytest

from tests.service.router.conftest import RunningRouter

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

ROUTER = {"body_deadline_s": 0.3}
FRAMINGS = {
    "length": (b"content-length: 1000", b" "),
    "chunked": (b"transfer-encoding: chunked", b"1\r\n \r\n"),
}


async def changing_paths(client: httpx.AsyncClient) -> list[str]:
    """Lists all POST paths except cancelling a response, which reads no body and answers at
    once."""
    paths = (await client.get("/openapi.json")).json()["paths"]
    return [
        path.format(worker_id="decode-0", key_id="0")
        for path, kinds in paths.items()
        if "post" in kinds and path != "/v1/responses/{response_id}/cancel"
    ]


async def slow_post(port: int, path: str, framing: str, *, drips: bool) -> bytes:
    """Sends a body that never ends. Returns everything received until the connection ends.

    Bytes sent after the answer may reset the connection instead of ending it.
    """
    field, piece = FRAMINGS[framing]
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def drip() -> None:
        while True:
            writer.write(piece)
            await asyncio.sleep(0.02)

    writer.write(head.encode() + field + b"\r\n\r\n" + piece)
    dripping = asyncio.create_task(drip() if drips else asyncio.sleep(0))
    answer = b""
    try:
        async with asyncio.timeout(30):
            with contextlib.suppress(ConnectionError):
                while part := await reader.read(1 << 16):
                    answer += part
    finally:
        dripping.cancel()
        writer.close()
    return answer


@pytest.mark.parametrize("drips", [False, True], ids=["stops", "drips"])
@pytest.mark.parametrize("framing", FRAMINGS)
async def test_a_slow_body_is_408_on_every_route(
    router: RunningRouter, framing: str, drips: bool
) -> None:
    own = router.router
    calls = [(own.http_port, path) for path in await changing_paths(router.http)]
    calls += [(own.admin.http_port, path) for path in await changing_paths(router.admin)]
    assert len(calls) >= 6
    answers = await asyncio.gather(
        *(slow_post(port, path, framing, drips=drips) for port, path in calls)
    )
    for (_, path), answer in zip(calls, answers, strict=True):
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 "), path
        assert b"connection: close" in head, path
        error = json.loads(body)["error"]
        assert (error["code"], error["type"]) == ("body_too_late", "invalid_request_error"), path
    assert not router.submitted

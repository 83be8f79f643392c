"""A stream begins when a worker has admitted the request, and is never silent for long."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import pytest

from tandem.api.http import stream as streams
from tests.harness.scripted_worker import Say, refusal, saying, update
from tests.service.router.conftest import RunningRouter, eventually

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

CHAT = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/completions": {"prompt": "x"},
    "/v1/messages": {"messages": CHAT, "max_tokens": 9},
    "/v1/responses": {"input": "x"},
}
PINGS = {"/v1/messages": 'event: ping\ndata: {"type":"ping"}\n\n'}


class Admitting:
    """A script of a worker that admits a request and then waits for `go_on`."""

    def __init__(self, router: RunningRouter) -> None:
        self.go_on = asyncio.Event()
        self.fails = False
        self._ids = [*router.tokenizer.encode("Hi!"), 2]

    async def __call__(self, submit: Any, say: Say) -> None:
        say(update(submit, [], is_admitted=True))
        await self.go_on.wait()
        if self.fails:
            say(refusal(submit, "internal_error"))
        else:
            await saying(self._ids, finish_reason="stop")(submit, say)


@asynccontextmanager
async def streamed(router: RunningRouter, path: str, **more: Any) -> AsyncIterator[httpx.Response]:
    body = {**BODIES[path], "stream": True}
    async with router.http.stream("POST", path, json=body, **more) as answer:
        yield answer


@pytest.mark.parametrize("path", BODIES)
async def test_the_head_comes_with_the_admission_and_then_signs_of_life(
    router: RunningRouter, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "KEEP_ALIVE_S", 0.02)
    ping = PINGS.get(path, ": keep-alive\n\n")
    script = Admitting(router)
    router.script(script)
    headers = {"x-tandem-placement": "1"}
    async with streamed(router, path, headers=headers) as answer:
        assert answer.status_code == 200
        assert "x-tandem-placement" in answer.headers
        assert not script.go_on.is_set(), "no token was sent"
        text = ""
        async for piece in answer.aiter_text():
            text += piece
            if text == ping * 3:
                script.go_on.set()
    assert text.startswith(ping * 3)
    rest = text.replace(ping, "")
    assert "Hi" in rest
    if path == "/v1/messages":
        begins = rest.split("\n\n")[0]
        assert begins.startswith("event: message_start")
        usage = json.loads(begins.split("data: ")[1])["message"]["usage"]
        assert usage["input_tokens"] > 0, "the counts are real"


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_with_tokens_has_no_comments(
    router: RunningRouter, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "KEEP_ALIVE_S", 5.0)
    router.script(saying([*router.tokenizer.encode("Hi!"), 2], finish_reason="stop"))
    async with streamed(router, path) as answer:
        text = (await answer.aread()).decode()
    assert ": keep-alive" not in text
    assert text.count("event: ping") == (path == "/v1/messages")


async def test_tokens_that_are_held_back_are_no_sign_of_life(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text of a custom tool's call comes in one piece, for example."""
    monkeypatch.setattr(streams, "KEEP_ALIVE_S", 0.1)
    (token,) = router.tokenizer.encode(" x")
    has_comment = asyncio.Event()

    async def holding(submit: Any, say: Say) -> None:
        for _ in range(300):
            say(update(submit, [token]))
            await asyncio.sleep(0.01)
            if has_comment.is_set():
                break
        say(update(submit, [2], "stop"))

    router.script(holding)
    body = {"messages": CHAT, "stream": True, "stop": " x" * 400}
    async with router.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line == ": keep-alive":
                has_comment.set()
    assert has_comment.is_set()


@pytest.mark.parametrize("path", BODIES)
async def test_an_error_after_the_admission_is_an_event(router: RunningRouter, path: str) -> None:
    script = Admitting(router)
    script.fails = True
    router.script(script)
    async with streamed(router, path) as answer:
        assert answer.status_code == 200
        script.go_on.set()
        text = (await answer.aread()).decode()
    assert "internal_error" in text
    assert "[DONE]" not in text
    assert ("event: error" in text) == (path in ("/v1/messages", "/v1/responses"))


@pytest.mark.parametrize("path", BODIES)
async def test_an_error_before_the_admission_keeps_its_status(
    router: RunningRouter, path: str
) -> None:
    async def refuses(submit: Any, say: Say) -> None:
        await asyncio.sleep(0.05)
        say(refusal(submit, "queue_full", 3.0))

    router.script(refuses)
    async with streamed(router, path) as answer:
        await answer.aread()
        assert answer.status_code == (529 if path == "/v1/messages" else 429)
        assert answer.headers["content-type"] == "application/json"


async def test_several_prompts_begin_when_all_are_admitted(router: RunningRouter) -> None:
    admits_all = asyncio.Event()
    num = 0

    async def one_by_one(submit: Any, say: Say) -> None:
        nonlocal num
        num += 1
        if num > 1:
            await admits_all.wait()
        say(update(submit, [], is_admitted=True))
        await saying([5, 2], finish_reason="stop")(submit, say) if num > 2 else None

    router.script(one_by_one)
    body = {"prompt": ["a", "b"], "stream": True}
    asked = asyncio.create_task(
        router.http.send(
            router.http.build_request("POST", "/v1/completions", json=body), stream=True
        )
    )
    await eventually(lambda: num == 2)
    await asyncio.sleep(0.1)
    assert not asked.done()
    admits_all.set()
    answer = await asked
    assert answer.status_code == 200
    await answer.aclose()


async def test_a_client_that_leaves_before_the_first_token_cancels(router: RunningRouter) -> None:
    script = Admitting(router)
    router.script(script)
    async with streamed(router, "/v1/chat/completions") as answer:
        assert answer.status_code == 200
    await eventually(lambda: len(router.cancelled) == 1)
    script.go_on.set()


async def test_timings_of_the_first_token_wait_for_it(router: RunningRouter) -> None:
    script = Admitting(router)
    router.script(script)
    asyncio.get_running_loop().call_later(0.1, script.go_on.set)
    async with streamed(router, "/v1/chat/completions", headers={"x-tandem-timing": "1"}) as answer:
        assert script.go_on.is_set()
        assert "server-timing" in answer.headers
        await answer.aread()


async def test_anthropics_client_takes_pings_before_its_message(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "KEEP_ALIVE_S", 0.02)
    script = Admitting(router)
    router.script(script)
    asyncio.get_running_loop().call_later(0.2, script.go_on.set)
    url = str(router.http.base_url)
    async with (
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
        client.messages.stream(model="tiny", messages=CHAT, max_tokens=9) as stream,  # type: ignore[arg-type]
    ):
        assert await stream.get_final_text() == "Hi!"

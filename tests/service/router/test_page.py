"""The operators' page over a real admin listener: its feed, its chat, and who may call them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.harness.scripted_worker import saying
from tests.service.router.conftest import RunningRouter, eventually

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

LIVE = "/v1/cluster/live"
CHAT = "/v1/cluster/chat"
ASKED = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}


async def read_until(router: RunningRouter, probe: Any) -> tuple[str, dict[str, Any]]:
    """Reads the feed until an event for which `probe` is true."""
    async with router.admin.stream("GET", LIVE) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        kind = ""
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                data = json.loads(line.removeprefix("data: "))
                if probe(kind, data):
                    return kind, data
    raise AssertionError("the feed ended")


async def test_the_feed_tells_all_and_then_goes_on(router: RunningRouter) -> None:
    feed = router.router._pages[""]
    _, full = await read_until(router, lambda kind, data: kind == "full")
    assert sorted(full["workers"]) == ["decode-0", "decode-1"]
    assert full["head"]["model"] == "tiny"
    assert full["head"]["public"]["port"] == router.router.http_port
    assert full["head"]["public"]["needs_key"] is False
    assert sorted(full["answers"]) == ["kv", "minute", "more_decode", "slow"]
    await read_until(router, lambda kind, data: kind == "delta")
    await eventually(lambda: not feed._viewers)  # a viewer that leaves holds no place


async def test_a_chat_is_answered_and_shown_with_its_stages(router: RunningRouter) -> None:
    router.script(saying(router.tokenizer.encode("Hi there")))
    answer = await router.admin.post(CHAT, json={**ASKED, "stream": True})
    assert answer.status_code == 200
    assert "Hi" in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")

    def has_it(kind: str, data: dict[str, Any]) -> bool:
        return any(r["outcome"] in ("stop", "length") for r in data.get("requests", []))

    _, told = await read_until(router, has_it)
    request = next(r for r in told["requests"] if r["outcome"] in ("stop", "length"))
    assert request["decode_worker"] in ("decode-0", "decode-1")
    assert request["why"].startswith("No worker held a part of the prompt, so the load decided.")
    assert request["longest"]
    assert request["ttft_ms"] > 0
    assert "tokenize" in request["stages_ms"]
    assert "Hello" not in json.dumps(told)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "https://evil.example"}, 403),
        ({"host": "evil.example"}, 403),
        ({"content-type": "text/plain"}, 415),
    ],
)
async def test_a_foreign_page_may_not_chat(
    router: RunningRouter, headers: dict[str, str], status: int
) -> None:
    content = json.dumps(ASKED).encode()
    sent = {"content-type": "application/json", **headers}
    assert (await router.admin.post(CHAT, content=content, headers=sent)).status_code == status
    assert router.submitted == []


async def test_a_name_of_another_may_not_read_the_feed(router: RunningRouter) -> None:
    answer = await router.admin.get(LIVE, headers={"host": "evil.example"})
    assert answer.status_code == 403


@pytest.mark.parametrize("path", [LIVE, "/page/main.js", "/"])
async def test_the_public_port_has_no_part_of_it(router: RunningRouter, path: str) -> None:
    answer: httpx.Response = await router.http.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_public"

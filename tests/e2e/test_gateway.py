"""Requests through a real Envoy, an endpoint picker and fronts, to a cluster with 1P2D."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tests.e2e.conftest import running_cluster
from tests.harness.client import DEADLINE_S, complete, golden, wait_published
from tests.harness.cluster import wait_for
from tests.harness.gateway import (
    SUBSET_HEADER,
    UPSTREAM_HEADER,
    Gateway,
    envoy,
)

PLACEMENT_HEADER = "x-tandem-placement"
PLACEMENT = {PLACEMENT_HEADER: "1"}
LONG = 320  # tokens


@pytest.fixture(scope="module")
def gateway(
    redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    envoy()
    folder = tmp_path_factory.mktemp("gateway")
    # Pulls are slow: a choice leaves nothing to chance where a prefix is.
    with running_cluster(redis_server, folder, "--transfer-bandwidth", "1e8", decode=2) as cluster:
        started = Gateway(cluster, folder)
        try:
            started.start()
            yield started
        finally:
            started.close()


def client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=DEADLINE_S)


def fresh_prompt() -> list[int]:
    """A prompt that no worker has, also when a test runs again."""
    return random.choices(range(1000, 5000), k=LONG)


async def placed(
    gateway: Gateway, http: httpx.AsyncClient, prompt: list[int], **headers: str
) -> httpx.Response:
    """Answers one short completion, with the line that says where it was placed. All routers know
    of its blocks then."""
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
    answer = await http.post("/v1/completions", json=body, headers={**PLACEMENT, **headers})
    assert answer.status_code == 200, answer.text
    await asyncio.to_thread(wait_published, gateway.cluster)
    return answer


def decode_of(answer: httpx.Response) -> str:
    line = answer.headers[PLACEMENT_HEADER]
    return line.partition("decode=")[2].partition(" ")[0]


async def test_picks_are_those_of_the_router_and_tokens_are_exact(gateway: Gateway) -> None:
    with gateway.envoy() as url:
        async with client(url) as through, client(gateway.cluster.url) as router:
            for worker_id, endpoint in gateway.fronts.items():
                prompt = fresh_prompt()
                first = await placed(gateway, through, prompt, **{SUBSET_HEADER: endpoint})
                assert decode_of(first) == worker_id
                own = await placed(gateway, router, prompt)
                assert decode_of(own) == worker_id, own.headers[PLACEMENT_HEADER]
                answer = await placed(gateway, through, prompt)
                assert answer.headers[UPSTREAM_HEADER] == endpoint
                assert decode_of(answer) == worker_id
                assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= LONG - 16
            prompts, expected = golden()
            answers = await asyncio.gather(*(complete(through, p) for p in prompts[:4]))
    assert [answer.token_ids for answer in answers] == expected[:4]


async def test_answers_stream(gateway: Gateway) -> None:
    prompts, _ = golden(0)
    with gateway.envoy() as url:
        async with client(url) as http:
            whole = await complete(http, prompts[0], max_tokens=32)
            body = {"prompt": prompts[0], "max_tokens": 32, "temperature": 0, "stream": True}
            events = [event async for event in stream(http, {**body, "ignore_eos": True})]
    assert events[-1] == "[DONE]"
    assert len(events) > 16
    assert "".join(text_of(event) for event in events[:-1]) == whole.text


async def stream(http: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[str]:
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                yield line.removeprefix("data: ")


def text_of(event: str) -> str:
    choices = json.loads(event)["choices"]
    return choices[0]["text"] if choices else ""


async def test_subsets_are_obeyed_against_the_prefix(gateway: Gateway) -> None:
    prompt = golden(1)[0][0]
    with gateway.envoy() as url:
        async with client(url) as http:
            for endpoint in (*gateway.fronts.values(), *gateway.fronts.values()):
                answer = await placed(gateway, http, prompt, **{SUBSET_HEADER: endpoint})
                assert answer.headers[UPSTREAM_HEADER] == endpoint
                assert gateway.fronts[decode_of(answer)] == endpoint
            body = {"prompt": prompt, "max_tokens": 4}
            subset = {SUBSET_HEADER: "127.0.0.1:1"}
            refused = await http.post("/v1/completions", json=body, headers=subset)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "no_workers"


async def test_a_front_picked_in_error_places_normally(gateway: Gateway) -> None:
    """Without a picker's hint a front is a router as any other."""
    prompt = fresh_prompt()
    async with client(gateway.cluster.url) as router:
        own = decode_of(await placed(gateway, router, prompt))
    for endpoint in gateway.fronts.values():
        async with client(f"http://{endpoint}") as front:
            assert decode_of(await placed(gateway, front, prompt)) == own
            forged = {"x-tandem-placement-hint": "eyJ9.00", "x-request-id": "one"}
            assert decode_of(await placed(gateway, front, prompt, **forged)) == own


async def until_answered(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    """Asks until the answer is no error."""
    while (await http.post("/v1/completions", json=body)).status_code != 200:
        pass


async def test_no_request_is_lost_when_the_picker_is_killed(gateway: Gateway) -> None:
    """Placed requests go on, and new ones get what the gateway does without a picker."""
    prompts, expected = golden()
    picker = gateway.picker_process
    assert picker is not None
    with gateway.envoy(fails_open=True) as fails_open, gateway.envoy() as fails_closed:
        async with client(fails_open) as open_http, client(fails_closed) as closed_http:
            clients = [open_http, closed_http, open_http, closed_http]
            calls = [
                complete(http, p, max_tokens=96)
                for http, p in zip(clients, prompts[:4], strict=True)
            ]
            live = [asyncio.create_task(call) for call in calls]
            placed_all = partial(wait_for, gateway.all_placed(4), deadline_s=30, what="placement")
            await asyncio.to_thread(placed_all)
            picker.send_signal(signal.SIGKILL)
            picker.wait()
            answers = await asyncio.gather(*live)
            assert [answer.token_ids[:64] for answer in answers] == expected[:4]
            body = {"prompt": prompts[0], "max_tokens": 4}
            async with asyncio.timeout(20):  # Envoy notices that the picker is gone
                await until_answered(open_http, body)
            assert (await complete(open_http, prompts[4])).token_ids == expected[4]
            assert (await closed_http.post("/v1/completions", json=body)).status_code == 500
            await asyncio.to_thread(gateway.start_picker)
            async with asyncio.timeout(20):
                await until_answered(closed_http, body)
            assert (await complete(closed_http, prompts[5])).token_ids == expected[5]

"""Limits by tenant over real sockets: two routers, a real Redis and a scripted worker."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from tandem.net.rpc.tandem.v1 import inference_pb2
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tests.harness.keyed_routers import (
    Routers,
    call,
    is_accepted,
    is_refused,
    ready,
    routers,
    tandem,
    until,
)
from tests.harness.scripted_worker import Say, silent, update
from tests.harness.waiting import eventually
from tests.security.tenant_limits import measure
from tests.service.router.test_http import EOS

__all__ = ["routers"]
pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

PROMPT = list(range(100, 110))
AT_ONCE = 8  # concurrent requests of one flood


async def create(admin: str, tenant: str, role: str = "user", **limits: int) -> str:
    asked = {"tenant": tenant, "role": role, "limits": limits}
    made = await call(admin, path="/v1/keys", **asked)
    assert made.status_code == 201, made.text
    return str(made.json()["key"])


async def two_routers(routers: Routers, key_of: dict[str, dict[str, int]]) -> tuple[Any, ...]:
    """Starts two routers with a key for each tenant. Returns their URLs and the keys."""
    urls = [await routers.start(name) for name in ("r1", "r2")]
    for url in urls:
        await ready(url)
    admin = routers.admin_of(urls[0])
    keys = {tenant: await create(admin, tenant, **limits) for tenant, limits in key_of.items()}
    spare = await create(admin, "spare")  # the last key; a router that has it has all
    await until(partial(is_refused, urls[1], ""))  # without any key, a router serves everybody
    await until(partial(is_accepted, urls[1], spare))
    return urls, keys


async def flood(urls: list[str], key: str, number: int) -> Counter[tuple[str, int]]:
    """Sends requests to the routers in turn. Returns the counts of statuses at each."""
    found: Counter[tuple[str, int]] = Counter()
    turns = asyncio.Semaphore(AT_ONCE)

    async with httpx.AsyncClient(timeout=20, headers={"authorization": f"Bearer {key}"}) as http:

        async def one(url: str) -> None:
            async with turns:
                body = {"prompt": PROMPT, "max_tokens": 1}
                answer = await http.post(f"{url}/v1/completions", json=body)
                found[url, answer.status_code] += 1

        await asyncio.gather(*(one(urls[n % len(urls)]) for n in range(number)))
    return found


def admitted(found: Counter[tuple[str, int]]) -> int:
    assert {status for _, status in found} <= {200, 429}
    return sum(count for (_, status), count in found.items() if status == 200)


async def test_limits_have_openais_form(routers: Routers) -> None:
    url = await routers.start("r1")
    await ready(url)
    limits = "--requests-per-minute 3 --tokens-per-minute 200 --max-prompt-tokens 50"
    admin = routers.admin_of(url)
    done = await tandem(
        admin, "create", "--tenant", "acme", *limits.split(), "--max-completion-tokens", "12"
    )
    key = done.stdout.strip()
    before = len(routers.worker.submitted)
    for body, word in (
        ({"prompt": [7] * 51}, "max_prompt_tokens 50"),
        ({"prompt": PROMPT, "max_tokens": 13}, "max_completion_tokens 12"),
    ):
        answer = await call(url, key, **body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "key_limit_exceeded")
        assert word in error["message"]
    for left in (2, 1, 0):
        answer = await call(url, key, prompt=PROMPT)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-ratelimit-limit-requests"] == "3"
        assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
        # Each earlier request used 10 prompt tokens and 1 completion token; this one may use 12 by
        # the key's limit.
        used = 11 * (2 - left) + 22
        assert answer.headers["x-ratelimit-remaining-tokens"] == str(200 - used)
        assert answer.headers["x-ratelimit-reset-tokens"] in ("1m0s", "1m1s")
    answer = await call(url, key, prompt=PROMPT)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (429, "rate_limit_exceeded")
    assert error["type"] == "requests"
    assert "3 requests per minute is reached: 3 used, and this request needs 1" in error["message"]
    assert 55 <= int(answer.headers["retry-after"]) <= 61
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    code, _, _ = await generate(routers.grpc_address("r1"), "", inference_pb2.EmbedRequest())
    assert code is grpc.StatusCode.UNAUTHENTICATED
    ids = inference_pb2.TokenIds(ids=PROMPT)
    embed = inference_pb2.EmbedRequest(input=[inference_pb2.EmbedInput(token_ids=ids)])
    for asked in (None, embed):
        code, trailers, _ = await generate(routers.grpc_address("r1"), key, asked)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert trailers["tandem-code"] == "rate_limit_exceeded"
        assert 55 <= int(trailers["retry-after"]) <= 61
    assert len(routers.worker.submitted) - before == 3
    metrics = (await call(admin, path="/metrics", method="GET")).text
    for line in (
        'tandem_requests_total{kind="completion",outcome="rate_limit_exceeded"} 2.0',
        'tandem_requests_total{kind="embedding",outcome="rate_limit_exceeded"} 1.0',
        'tandem_tenant_limit_refusals_total{limit="requests",tenant="acme"} 3.0',
        'tandem_tenant_requests_total{tenant="acme"} 3.0',
        "tandem_num_requests_running 0.0",
    ):
        assert line in metrics.splitlines(), line
    await check_update_and_usage(routers, url, key)


COUNT = {"messages": [{"role": "user", "content": "hello"}], "model": "SmolLM2-135M-Instruct"}


@pytest.mark.parametrize(
    ("path", "body", "number"),
    [
        ("/tokenize", {"prompt": "a b c"}, 1),
        ("/tokenize", {"prompt": ["a b c", "d"]}, 2),
        ("/tokenize", {"messages": [{"role": "user", "content": "hello"}]}, 1),
        ("/detokenize", {"tokens": PROMPT}, 1),
        ("/v1/messages/count_tokens", COUNT, 1),
    ],
)
async def test_calls_for_tokens_count_as_requests(
    routers: Routers, path: str, body: dict[str, Any], number: int
) -> None:
    """They use no tokens of the limit, and share the limit of requests with generations."""
    url = await routers.start("r1")
    await ready(url)
    limits = {"requests_per_minute": 2 * number + 1, "tokens_per_minute": 1000}
    key = await create(routers.admin_of(url), "acme", **limits, max_concurrent=2)
    refused = await call(url, key, path, **{**body, "tokens": [-1], "prompt": "", "messages": []})
    assert refused.status_code == 400, "a refused request counts nothing"
    for left in (number + 1, 1):
        answer = await call(url, key, path, **body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
        assert answer.headers["x-ratelimit-remaining-tokens"] == "1000"
    assert (await call(url, key, prompt=PROMPT)).status_code == 200
    answer = await call(url, key, path, **body)
    assert answer.status_code == 429, answer.text
    assert 55 <= int(answer.headers["retry-after"]) <= 61
    assert (await call(url, key, prompt=PROMPT)).status_code == 429


async def test_a_prompt_to_be_counted_is_bounded_by_the_key(routers: Routers) -> None:
    url = await routers.start("r1")
    await ready(url)
    key = await create(routers.admin_of(url), "acme", max_prompt_tokens=20)
    long = "one two three " * 20
    for path, body in (
        ("/tokenize", {"prompt": long}),
        ("/v1/messages/count_tokens", {**COUNT, "messages": [{"role": "user", "content": long}]}),
    ):
        answer = await call(url, key, path, **body)
        assert answer.status_code == 400
        assert "max_prompt_tokens 20" in answer.text
    assert (await call(url, key, "/tokenize", prompt="one two three")).status_code == 200


async def check_update_and_usage(routers: Routers, url: str, key: str) -> None:
    key_id = key.split("-")[1]
    done = await tandem(routers.admin_of(url), "update", key_id, "--requests-per-minute", "20")
    assert "requests_per_minute: 20\ntokens_per_minute: 200" in done.stdout
    # Eight prompts count as eight requests, which exceed the limit, so none of them is counted.
    refused = await call(url, key, prompt=[PROMPT] * 8)
    assert refused.json()["error"]["type"] == "tokens"
    answer = await call(url, key, prompt=PROMPT)
    assert answer.headers["x-ratelimit-remaining-requests"] == "16"
    assert answer.headers["x-ratelimit-remaining-tokens"] == str(200 - 3 * 11 - 22)
    code, trailers, _ = await generate(routers.grpc_address("r1"), key)
    assert code is grpc.StatusCode.OK
    assert trailers["x-ratelimit-remaining-requests"] == "15"
    (row,) = (await call(url, key, "/v1/usage?window=minute&last=3", "GET")).json()["data"]
    del row["start"]
    assert row == {
        "object": "usage",
        "window": "minute",
        "tenant": "acme",
        "requests": 5,
        "prompt_tokens": 50,
        "cached_tokens": 0,
        "completion_tokens": 5,
    }
    assert (await call(url, key, "/v1/usage?tenant=other", "GET")).status_code == 403
    assert (await call(url, key, "/v1/usage?last=x", "GET")).status_code == 400
    async with grpc.aio.insecure_channel(routers.grpc_address("r1")) as channel:
        metadata = (("authorization", f"Bearer {key}"),)
        asked = inference_pb2.GetUsageRequest()
        told = await InferenceStub(channel).GetUsage(asked, metadata=metadata)
    assert [(u.tenant, u.requests, u.completion_tokens) for u in told.usage] == [("acme", 5, 5)]


async def generate(
    address: str, key: str, embed: inference_pb2.EmbedRequest | None = None
) -> tuple[Any, dict[str, str], str]:
    """Sends a gRPC generation, or the given embedding request. Returns the status, the trailing
    metadata and the message."""
    async with grpc.aio.insecure_channel(address) as channel:
        metadata = (("authorization", f"Bearer {key}"),) if key else ()
        ids = inference_pb2.TokenIds(ids=PROMPT)
        asked = inference_pb2.GenerateRequest(token_ids=ids, max_tokens=1)
        stub = InferenceStub(channel)
        made = (
            stub.Generate(asked, metadata=metadata)
            if embed is None
            else stub.Embed(embed, metadata=metadata)
        )
        try:
            async for _ in made:
                pass
        except grpc.aio.AioRpcError:
            pass
        trailers = {k: str(v) for k, v in await made.trailing_metadata()}
        return await made.code(), trailers, await made.details()


async def test_two_routers_keep_one_limit_with_redis_and_without(routers: Routers) -> None:
    limit = 20
    names = ("a", "b", "c", "d")
    limits = {"requests_per_minute": limit}
    urls, keys = await two_routers(routers, dict.fromkeys(names, limits))
    total = Counter(d=limit // 2)
    for name in names[:3]:
        total[name] += admitted(await flood(urls, keys[name], limit // 2))
    total["d"] += admitted(await flood(urls, keys["d"], 4)) - 4
    assert total == dict.fromkeys(names, limit // 2)
    routers.redis.kill()
    floods = await asyncio.gather(*(flood(urls, keys[name], 5 * limit) for name in names[:3]))
    for name, found in zip(names, floods, strict=False):
        total[name] += admitted(found)
        assert 0.9 * limit <= total[name] <= 1.1 * limit
        for url in urls:  # each router got half of the traffic
            assert limit / 8 <= found[url, 200] <= limit / 2.5
    assert admitted(await flood(urls, keys["d"], 4)) == 4
    await asyncio.to_thread(routers.redis.restart)
    limiters = [router.tenants.limiter for router, _ in routers.started.values()]
    await eventually(lambda: any(not limiter._is_away for limiter in limiters))
    while any(limiter._is_alone for limiter in limiters):
        for name in names[:3]:
            total[name] += admitted(await flood(urls, keys[name], 4))
        await asyncio.sleep(0.1)
    for name in names[:3]:
        total[name] += admitted(await flood(urls, keys[name], limit))
        assert 0.95 * limit <= total[name] <= 1.1 * limit, total
    assert admitted(await flood(urls, keys["d"], 2)) == 2


async def test_requests_at_once_over_two_routers(routers: Routers) -> None:
    urls, keys = await two_routers(routers, {"acme": {"max_concurrent": 2}})
    answering = routers.worker.script
    routers.worker.script = silent
    open_ones = [
        asyncio.create_task(call(url, keys["acme"], prompt=PROMPT, max_tokens=1)) for url in urls
    ]
    limiters = [router.tenants.limiter for router, _ in routers.started.values()]
    await eventually(
        lambda: (
            all(r.running == 1 for each in limiters for r in each._tenants.values())
            and all(each._tenants for each in limiters)
        )
    )
    refused = await call(urls[0], keys["acme"])
    assert refused.status_code == 429
    assert "2 requests at once is reached: 2 used" in refused.json()["error"]["message"]
    routers.worker.script = answering
    open_ones[1].cancel()  # the client disconnects
    await until(partial(is_accepted, urls[0], keys["acme"]))
    await until(partial(is_accepted, urls[1], keys["acme"]))
    open_ones[0].cancel()
    await asyncio.wait(open_ones)


async def test_a_search_costs_what_it_made(routers: Routers) -> None:
    """A user's key requests beam searches: short beams win, or the client leaves before they
    end."""
    url = await routers.start("r1")
    await ready(url)
    key = await create(routers.admin_of(url), "acme", tokens_per_minute=10_000)
    answering = routers.worker.script
    begun = len(routers.worker.submitted)
    numbers = itertools.count(1000)

    async def search(submit: pb.SubmitSequence, say: Say) -> None:
        top = [EOS, 1001, 1002, 1003]
        entry = pb.LogprobEntry(logprob=-1, rank=1, top_ids=top, top_logprobs=[-1, -1.1, -1.2, -9])
        if len(submit.input.token_ids) == len(PROMPT) + 6:
            return  # the beams of the second search stay open until the client leaves
        say(update(submit, [EOS], "length", is_committed=True, logprobs=[entry]))
        routers.worker.tell_load(next(numbers))

    routers.worker.script = search
    beams = {"prompt": PROMPT, "n": 2, "use_beam_search": True, "length_penalty": -10.0}
    found = await call(url, key, max_tokens=6, **beams)
    assert found.json()["usage"]["completion_tokens"] == 3, found.text
    left = asyncio.create_task(call(url, key, max_tokens=9, **beams))
    await eventually(lambda: len(routers.worker.submitted) - begun == (1 + 5 * 2) + (1 + 6 * 2))
    left.cancel()
    await asyncio.wait([left])
    routers.worker.script = answering
    made = 2 * (len(PROMPT) + 1 + 5 * 2)

    async def used() -> int:
        answer = await call(url, key, prompt=PROMPT, max_tokens=1)
        remaining = int(answer.headers["x-ratelimit-remaining-tokens"])
        return 10_000 - remaining

    num_asked = 0

    async def is_settled() -> bool:
        nonlocal num_asked
        num_asked += 1
        return await used() == made + num_asked * (len(PROMPT) + 1)

    await until(is_settled)


@pytest.mark.slow
async def test_nobody_exceeds_a_limit_in_any_minute(tmp_path: Path) -> None:
    """The long form with real minutes; `tests/security/tenant_limits.py` prints its figures."""
    figures = await measure(tmp_path, 60.0)
    assert set(figures.statuses) == {200, 429}
    assert max(figures.with_redis.values()) <= 1.02
    assert max(figures.with_an_outage.values()) <= 1.10
    assert min(figures.with_redis[tenant] for tenant in ("flood-1", "flood-2", "tokens")) >= 0.9
    assert figures.half_beside >= 0.98 * figures.half_alone
    assert figures.large_served

"""Limiters and usage meters of several routers, on a real Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.common.process.cancellation import cancel
from tandem.errors import RateLimited, UsageUnknown
from tandem.net.security.limits import NO_LIMITS, Limits
from tandem.net.store.client import Client, connect
from tandem.router.limits.counts import LEASE_MS, TenantCounts
from tandem.router.limits.limiter import Limiter, LimitReservation
from tandem.router.limits.metrics import TenantMetrics
from tandem.router.limits.usage import UsageMeter, UsageQuery
from tandem.router.limits.usage_store import UsageRow, UsageStore
from tandem.router.limits.window import Use
from tests.service.router.conftest import eventually

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

CLUSTER = "test"
TODAY = UsageQuery("day", 1, None)


@dataclass
class Cluster:
    """The limiters of some routers, which share a Redis."""

    server: EmbeddedRedis
    redis: Client
    runs: dict[Limiter, asyncio.Task[None]] = field(default_factory=dict)

    def limiter(self, name: str, num_routers: int = 2) -> Limiter:
        counts = TenantCounts(self.redis, CLUSTER, name)
        limiter = Limiter(
            counts, TenantMetrics(CollectorRegistry()), num_routers=lambda: num_routers
        )
        self.runs[limiter] = asyncio.create_task(limiter.run())
        return limiter

    def meter(self, name: str) -> UsageMeter:
        store = UsageStore(self.redis, CLUSTER, name)
        return UsageMeter(store, TenantMetrics(CollectorRegistry()))


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    with EmbeddedRedis(tmp_path) as server:
        redis = connect(server.url)
        found = Cluster(server, redis)
        yield found
        await cancel(*found.runs.values())
        await redis.aclose()


async def ask(limiter: Limiter, limits: Limits, tokens: int = 1, took: int | None = None) -> bool:
    """Asks for one request and ends it at once. Returns whether it was admitted."""
    try:
        async with limiter.reserved("acme", limits, tokens, is_counted=True) as held:
            limiter.settle(held, tokens if took is None else took)
            return True
    except RateLimited:
        return False


async def hold(
    held: AsyncExitStack, limiter: Limiter, limits: Limits, tokens: int = 1
) -> LimitReservation:
    """Admits a request that runs until the stack ends."""
    reserved = limiter.reserved("acme", limits, tokens, is_counted=True)
    return await held.enter_async_context(reserved)


def use(limiter: Limiter) -> Use:
    """Returns the use of all routers as one limiter knows it."""
    tenant = limiter._tenants["acme"]
    return tenant.window.joined(tenant.others).use(tenant.running + tenant.others_running)


async def test_routers_share_one_limit_however_many_ask_at_once(cluster: Cluster) -> None:
    limiters = [cluster.limiter(f"r{n}", 3) for n in range(3)]
    limits = Limits(requests_per_minute=50)
    asked = [ask(limiters[n % 3], limits) for n in range(300)]
    assert sum(await asyncio.gather(*asked)) == 50
    # A key without limits counts for its tenant, too, and is never refused.
    assert await ask(limiters[0], NO_LIMITS)
    await eventually(lambda: not limiters[0]._tenants["acme"].is_dirty)
    assert not await ask(limiters[1], Limits(requests_per_minute=51))
    assert await ask(limiters[1], Limits(requests_per_minute=52))


async def test_a_request_larger_than_a_slice_of_the_limit_is_served(cluster: Cluster) -> None:
    one, two = cluster.limiter("r1"), cluster.limiter("r2")
    limits = Limits(tokens_per_minute=1000)
    assert await ask(one, limits, 1000, took=300)
    assert await ask(one, limits, 700, took=700)
    await eventually(lambda: not one._tenants["acme"].calls)
    assert not await ask(two, limits, 1)


async def test_tokens_come_back_whatever_the_end_is(cluster: Cluster) -> None:
    one, two = cluster.limiter("r1"), cluster.limiter("r2")
    limits = Limits(requests_per_minute=10, tokens_per_minute=1000, max_concurrent=5)
    assert await ask(one, limits, 900, took=40)
    with suppress(ZeroDivisionError):
        async with AsyncExitStack() as held:
            await hold(held, one, limits, 900)
            raise ZeroDivisionError  # nothing was settled: it was not served
    asking = asyncio.create_task(ask(one, limits, 900))
    await asyncio.sleep(0)
    asking.cancel()  # its client leaves while Redis decides
    await asyncio.wait([asking])
    await eventually(lambda: not one._tenants["acme"].calls)
    assert use(one) == Use(1, 40, 0)
    assert await ask(two, limits, 960)
    assert not await ask(two, limits, 1)
    assert use(two) == Use(2, 1000, 0)


async def test_requests_at_once_of_a_router_that_is_killed_end_to_count(cluster: Cluster) -> None:
    one, two = cluster.limiter("r1"), cluster.limiter("r2")
    limits = Limits(max_concurrent=3, requests_per_minute=100)
    async with AsyncExitStack() as held:
        for _ in range(3):
            await hold(held, one, limits)
        assert not await ask(two, limits)
        await asyncio.sleep(LEASE_MS / 1000 + 0.5)
        assert not await ask(two, limits)  # it lives, and says so
        await cancel(cluster.runs[one])
        killed_at = time.monotonic()
        while not await ask(two, limits):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        assert time.monotonic() - killed_at <= LEASE_MS / 1000 + 1
        assert use(two).requests == 4  # what it had admitted still counts


async def test_an_outage_of_redis_keeps_the_split_and_ends_without_a_jump(cluster: Cluster) -> None:
    one, two = cluster.limiter("r1"), cluster.limiter("r2")
    limits = Limits(requests_per_minute=100)
    assert [await ask(limiter, limits) for limiter in [one] * 30 + [two] * 10] == [True] * 40
    await asyncio.gather(ask(one, limits), ask(two, limits))
    cluster.server.kill()
    admitted = [await asyncio.gather(*(ask(n, limits) for _ in range(150))) for n in (one, two)]
    own = [limiter._tenants["acme"].window.use().requests for limiter in (one, two)]
    assert 98 <= sum(own) <= 102
    assert 72 <= own[0] <= 76
    assert all(True in answers and False in answers for answers in admitted)
    # A tenant that no router had seen gets one part in as many as there are routers.
    fresh = [two.reserved("new", limits, 1, is_counted=True) for _ in range(60)]
    async with AsyncExitStack() as held:
        entered = await asyncio.gather(
            *(held.enter_async_context(f) for f in fresh), return_exceptions=True
        )
    assert sum(isinstance(e, LimitReservation) for e in entered) == 50
    await asyncio.to_thread(cluster.server.restart)  # empty
    for _ in range(20):
        answers = await asyncio.gather(*(ask(n, limits) for n in (one, two) for _ in range(10)))
        assert sum(answers) <= 3  # the share rounds down where the whole limit does not
        await asyncio.sleep(0.2)
    assert not any(limiter._is_alone for limiter in (one, two))
    assert use(one).requests <= 102
    assert use(one) == use(two)


async def test_counts_that_redis_forgot_or_that_nobody_can_read_let_nobody_through(
    cluster: Cluster,
) -> None:
    one, two = cluster.limiter("r1"), cluster.limiter("r2")
    limits = Limits(requests_per_minute=20)
    assert all([await ask(limiter, limits) for limiter in [one, two] * 10])
    key = f"{{tandem:{CLUSTER}}}:limits:acme"
    await cluster.redis.hset(key, "broken", b"\x92\x01")
    await cluster.redis.hset(key, "strange", b"\x93\xa1x\xa1y\xa1z")
    assert not await ask(one, limits)
    assert len(await cluster.redis.hgetall(key)) == 2
    await cluster.redis.flushall()
    answers = [await ask(limiter, limits) for limiter in [one, two] * 10]
    assert sum(answers) <= 1
    await eventually(lambda: not (one._is_alone or two._is_alone))
    assert not await ask(one, limits)
    assert not await ask(two, limits)


async def test_what_has_no_limits_asks_redis_nothing(cluster: Cluster) -> None:
    limiter = cluster.limiter("r1")
    limits = Limits(max_prompt_tokens=10, max_completion_tokens=10, weight=7)
    for each in (NO_LIMITS, limits):
        async with limiter.reserved("acme", each, 5, is_counted=False) as held:
            assert held.headers == {}
    assert not limiter._tenants


async def test_usage_is_counted_once_through_lost_answers_and_outages(cluster: Cluster) -> None:
    one, two = cluster.meter("r1"), cluster.meter("r2")
    for meter in (one, two):
        meter.add("acme", prompt=10, cached=4, completion=3)
    one.add("other", prompt=1, cached=0, completion=1)
    store = one._store
    add = one._store.add

    async def lose_the_answer(*args: object) -> bool:
        await add(*args)  # type: ignore[arg-type]
        raise TimeoutError

    store.add = lose_the_answer  # type: ignore[assignment]
    assert not await one.flush()
    store.add = add  # type: ignore[method-assign]
    cluster.server.kill()
    one.add("acme", prompt=100, cached=0, completion=1)
    assert not await one.flush()
    assert not await two.flush()
    with pytest.raises(UsageUnknown):
        await one.read(TODAY, now=time.time())
    await asyncio.to_thread(cluster.server.restart)
    assert await one.flush()
    assert await two.flush()
    rows = await one.read(TODAY._replace(tenant="acme"), now=time.time())
    (row,) = rows
    assert (row.requests, row.prompt_tokens, row.completion_tokens) == (3, 120, 7)
    assert await one.flush()
    assert rows == await two.read(TODAY._replace(tenant="acme"), now=time.time())


async def test_a_batch_whose_answer_was_lost_is_not_added_again(cluster: Cluster) -> None:
    meter = cluster.meter("r1")
    meter.add("acme", prompt=10, cached=4, completion=3)
    store = meter._store
    add = meter._store.add
    calls: list[bool] = []

    async def lose_the_answer(*args: object) -> bool:
        calls.append(await add(*args))  # type: ignore[arg-type]
        raise TimeoutError

    store.add = lose_the_answer  # type: ignore[assignment]
    for _ in range(3):
        assert not await meter.flush()
    store.add = add  # type: ignore[method-assign]
    meter.add("acme", prompt=1, cached=0, completion=1)
    now = time.time()
    day, minute = (int(now // s) * s for s in (86400, 60))
    for query, start in ((TODAY, day), (UsageQuery("minute", 2, "acme"), minute)):
        (row, *_) = await meter.read(query, now=now)
        assert row == UsageRow("acme", start, 2, 11, 4, 4)
    assert calls == [True, False, False]
    assert await meter.read(TODAY._replace(tenant="nobody"), now=now) == []

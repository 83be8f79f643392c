"""Whole clusters whose workers share an object store, which outlives them all and may fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

pytest.importorskip("obstore")
pytest.importorskip("moto")

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tests.e2e.conftest import running_cluster
from tests.harness.client import complete, golden, metric, open_client
from tests.harness.cluster import LocalCluster, wait_for
from tests.harness.kv_form import KvForm
from tests.harness.object_store import BUCKET, ObjectStoreServer

PLACEMENT = "x-tandem-placement"
DEADLINE_S = 120.0
LOADED, WRITTEN = (f"tandem_kv_tier_blocks_{what}_total" for what in ("loaded", "written"))
NUM_CLIENTS = 4
PER_FAULT = 16  # requests that end while the store has a fault, at least
NUM_BLOCKS = 40  # of a worker's pool, which holds two of the prompts
MAX_TOKENS = 6


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectStoreServer]:
    server = ObjectStoreServer(tmp_path)
    yield server
    server.kill()


@contextmanager
def cluster_with(
    store: ObjectStoreServer, folder: Path, *options: str, **sizes: Any
) -> Iterator[tuple[LocalCluster, EmbeddedRedis]]:
    """A cluster with a Redis of its own."""
    credentials = folder / "credentials"
    credentials.touch(0o600)
    credentials.write_text("[default]\naws_access_key_id = test\naws_secret_access_key = test\n")
    options += ("--kv-store-url", f"s3://{BUCKET}/kv", "--kv-store-endpoint", store.url)
    options += ("--kv-store-region", "us-east-1", "--kv-store-credentials", str(credentials))
    options += ("--kv-tier-policy", "lru")
    with (
        EmbeddedRedis(folder / "redis") as redis,
        running_cluster(redis, folder, *options, **sizes) as cluster,
    ):
        yield cluster, redis


def ask(cluster: LocalCluster, prompt: list[int], max_tokens: int) -> tuple[dict[str, Any], str]:
    """Returns the answer, and the worker that decoded it."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(
        f"{cluster.url}/v1/completions",
        json={**body, "return_token_ids": True},
        headers={PLACEMENT: "1"},
        timeout=240,
    )
    assert answer.status_code == 200, answer.text
    worker = answer.headers[PLACEMENT].split("decode=")[1].split()[0]
    return answer.json(), worker


def check_loaded(answer: dict[str, Any], expected: list[int], prompt: list[int]) -> None:
    """Its tokens are right, and its prompt came from the store, but for a part of a block and what
    was computed while the rest was loaded."""
    assert answer["choices"][0]["token_ids"] == expected
    details = answer["usage"]["prompt_tokens_details"]
    by_tier = details["cached_tokens_by_tier"]
    assert sum(by_tier.values()) == details["cached_tokens"] == by_tier["store"], by_tier
    assert by_tier["store"] >= len(prompt) // 2


def test_new_workers_load_what_those_before_them_wrote(
    store: ObjectStoreServer, tmp_path: Path
) -> None:
    """All workers and Redis end. A chat that goes on then is loaded by a worker that asks the
    store alone."""
    (prompt,), (expected,) = golden(6)
    with cluster_with(store, tmp_path) as (cluster, redis):
        first, _ = ask(cluster, prompt, 16)
        assert first["choices"][0]["token_ids"] == expected[:16]
        wait_until_written(store, prompt)
        end_all(cluster)
        redis.restart()
        cluster.start_worker("decode-1", "decode")
        cluster.wait_ready()
        again, _ = ask(cluster, [*prompt, *expected[:16]], 8)
        check_loaded(again, expected[16:24], prompt)
        cluster.wait_idle()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
def test_a_worker_loads_what_lost_ones_wrote(
    store: ObjectStoreServer, tmp_path: Path, prefill: int, decode: int
) -> None:
    """The others go on: a second decode worker, or new ones that find the router and Redis."""
    (prompt,), (expected,) = golden(7)
    with cluster_with(store, tmp_path, prefill=prefill, decode=decode) as (cluster, redis):
        first, chosen = ask(cluster, prompt, 16)
        assert first["choices"][0]["token_ids"] == expected[:16]
        wait_until_written(store, prompt)
        for worker_id in list(cluster.workers):
            if worker_id == chosen or worker_id.startswith("prefill"):
                cluster.workers.pop(worker_id).kill()
        if not cluster.workers:
            cluster.start_worker("decode-9", "decode")
            cluster.wait_ready()
        (other,) = cluster.workers
        again, returned = ask(cluster, prompt, 16)
        assert returned == other
        check_loaded(again, expected[:16], prompt)
        cluster.wait_idle()
        end_all(cluster)
        redis.restart()
        for number in range(prefill):
            cluster.start_worker(f"prefill-{number}", "prefill")
        for number in range(decode):
            cluster.start_worker(f"decode-{number}", "decode")
        cluster.wait_ready()
        after, _ = ask(cluster, [*prompt, *expected[:16]], 8)
        check_loaded(after, expected[16:24], prompt)
        cluster.wait_idle()


def wait_until_written(store: ObjectStoreServer, prompt: list[int]) -> None:
    num_blocks = len(prompt) // 16
    wait_for(lambda: len(store.blocks()) >= num_blocks, deadline_s=DEADLINE_S, what="writes")


def end_all(cluster: LocalCluster) -> None:
    """Kills all workers; the router stays."""
    while cluster.workers:
        cluster.workers.popitem()[1].kill()


class Chats:
    """Clients in a closed loop: prompts that fit no pool together, and their right answers."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._rng = Random(1)
        self._expected: list[tuple[list[int], list[int]]] = []
        self._over = asyncio.Event()
        self.num_answered = 0

    async def learn(self, num_prompts: int) -> None:
        """Asks for the answers while nothing is cached. Two and two prompts share a beginning."""
        async with open_client(self._cluster) as client:
            shared: list[int] = []
            for number in range(num_prompts):
                if number % 2 == 0:
                    shared = [self._rng.randrange(100, 40_000) for _ in range(150)]
                tail = [self._rng.randrange(100, 40_000) for _ in range(100)]
                prompt = [*shared, *tail]
                answer = await complete(client, prompt, max_tokens=MAX_TOKENS)
                self._expected.append((prompt, answer.token_ids))

    async def run(self) -> None:
        """Asks until `stop`. Each answer is 200 and right, at whatever the store does."""

        async def client_of(client: httpx.AsyncClient) -> None:
            while not self._over.is_set():
                prompt, expected = self._rng.choice(self._expected)
                answer = await complete(client, prompt, max_tokens=MAX_TOKENS)
                assert answer.token_ids == expected
                self.num_answered += 1

        async with open_client(self._cluster) as client, asyncio.TaskGroup() as tasks:
            for _ in range(NUM_CLIENTS):
                tasks.create_task(client_of(client))

    def stop(self) -> None:
        self._over.set()

    async def wait_for_answers(self, count: int) -> None:
        """Returns when so many more requests have been answered."""
        until = self.num_answered + count
        while self.num_answered < until:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def wait_until(self, probe: Callable[[], bool], what: str) -> None:
        await asyncio.to_thread(wait_for, probe, deadline_s=DEADLINE_S, what=what, interval_s=0.2)


def total(cluster: LocalCluster, name: str) -> float:
    return sum(metric(cluster, worker_id, name, tier="store") for worker_id in cluster.workers)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("form", "sizes"),
    [
        (KvForm("gemma3"), {"prefill": 2, "decode": 1}),
        (KvForm(), {"prefill": 1, "decode": 2}),
    ],
    ids=["gemma3", "smollm2"],
)
async def test_no_fault_of_the_store_fails_a_request(
    store: ObjectStoreServer, tmp_path: Path, form: KvForm, sizes: dict[str, int]
) -> None:
    """The store hangs, is killed, comes back without its objects, and hangs again when workers
    start and end. Small models are computed sooner than loaded, so they may load nothing."""
    options = ("--num-blocks", str(NUM_BLOCKS))
    model = form.model(tmp_path)
    with cluster_with(store, tmp_path, *options, model=model, **sizes) as (cluster, _):
        chats = Chats(cluster)
        await chats.learn(8)
        clients = asyncio.create_task(chats.run())
        faults = asyncio.create_task(do_faults(store, cluster, chats, loads=form.has_references))
        await asyncio.wait({clients, faults}, return_when=asyncio.FIRST_COMPLETED)
        chats.stop()
        faults.cancel()
        await clients
        await faults
        cluster.wait_idle()


async def do_faults(
    store: ObjectStoreServer, cluster: LocalCluster, chats: Chats, *, loads: bool
) -> None:
    """Does each fault under load, and sees the store used after each."""

    async def see_more(name: str) -> None:
        before = total(cluster, name)
        await chats.wait_until(lambda: total(cluster, name) > before, f"more of {name}")

    async def see_it_used() -> None:
        for name in (LOADED, WRITTEN) if loads else (WRITTEN,):
            await see_more(name)

    await see_it_used()
    store.stop()
    await chats.wait_for_answers(PER_FAULT)
    store.resume()
    await see_it_used()
    store.kill()
    await chats.wait_for_answers(PER_FAULT)
    await asyncio.to_thread(store.start)
    await see_it_used()
    store.stop()
    await chats.wait_for_answers(4)
    cluster.workers["decode-0"].kill()
    cluster.start_worker("decode-0", "decode")
    await asyncio.to_thread(cluster.wait_ready)
    await chats.wait_for_answers(PER_FAULT)
    store.kill()
    await asyncio.to_thread(store.start)
    await see_it_used()

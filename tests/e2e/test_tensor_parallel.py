"""Workers of several ranks are exact for every degree, also when a rank ends or is stopped."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.common.sampling_params import SamplingParams
from tandem.llm import LLM
from tests.harness.client import metric, migrations, open_client, stream_completion, tokens_of
from tests.harness.cluster import LocalCluster, WorkerProcess, wait_for
from tests.tiny_models import make_random_speaker

NUM_TOKENS = 200  # so many that streams still run when a rank ends
BEGUN = 4  # tokens of each stream when a rank ends
PREEMPTED = 60  # tokens of each stream for which a pool of 60 blocks has no room
SMALL_POOL = 100  # blocks: enough for the prompts, but not for all their answers at once
OWN_POOLS = ("--kernels", "torch", "--ranks-own-pools")
HOST_TIER = ("--kv-host-memory", str(64 << 20))
RANK_MODULE = "tandem.engine.executor.rank_program"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its MLP is so large that workers load blocks from tiers, which is always faster than to
    compute them."""
    return make_model(tmp_path_factory.mktemp("model"), num_kv_heads=4, intermediate_size=8192)


def make_model(folder: Path, *, num_kv_heads: int, intermediate_size: int) -> str:
    heads = {"num_attention_heads": 8, "num_key_value_heads": num_kv_heads}
    sizes = {"hidden_size": 128, "intermediate_size": intermediate_size}
    return str(make_random_speaker(folder, **heads, **sizes).path)


PROMPTS = [random.Random(size).choices(range(100, 40_000), k=size) for size in (300, 170, 95, 33)]


@pytest.fixture(scope="module")
def expected(model: str) -> list[list[int]]:
    """What one process with one thread answers: greedily, and drawn by a seed."""
    return alone(model)


@pytest.fixture(scope="module")
def torch_expected(model: str) -> list[list[int]]:
    return alone(model, kernels="torch")


def alone(model: str, **settings: Any) -> list[list[int]]:
    with LLM(model, device="cpu", numerics="invariant", num_threads=1, **settings) as llm:
        params = [SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **p) for p in SAMPLED]
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS for _ in SAMPLED]
        outputs = llm.generate(prompts, params * len(PROMPTS))
        return [list(output.outputs[0].token_ids) for output in outputs]


SAMPLED: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 11}]


@contextmanager
def workers(
    redis: EmbeddedRedis,
    folder: Path,
    model: str,
    degrees: dict[str, int],
    *options: str,
) -> Iterator[LocalCluster]:
    """A cluster with these workers, such as decode-0, each of so many ranks."""
    cluster = LocalCluster(redis, folder, model)
    cluster.options = [*cluster.options, "--prefill-at", "remote", *options]
    # No request is refused because a busy machine computes slowly.
    cluster.router_options = [*cluster.router_options, "--ttft-limit", "0"]
    try:
        cluster.start_router()
        for worker_id, degree in degrees.items():
            role = worker_id.partition("-")[0]
            cluster.start_worker(worker_id, role, "--tensor-parallel", str(degree))
        cluster.wait_ready()
        yield cluster
    finally:
        cluster.close()


async def answers(
    client: httpx.AsyncClient,
    begun: Callable[[], object] | None = None,
    num_tokens: int = NUM_TOKENS,
) -> list[list[int]]:
    """The tokens of all prompts, asked at once. `begun` is called when all have a few tokens."""
    events = [asyncio.Event() for _ in range(len(PROMPTS) * len(SAMPLED))]

    async def one(prompt: list[int], sampled: dict[str, Any], has_begun: asyncio.Event) -> Any:
        found: list[dict[str, Any]] = []
        more = {"max_tokens": num_tokens, "ignore_eos": True, **sampled}
        async for event in stream_completion(client, prompt, **more):
            found.append(event)
            if len(tokens_of(found)) >= BEGUN:
                has_begun.set()
        return tokens_of(found)

    pairs = [(prompt, sampled) for prompt in PROMPTS for sampled in SAMPLED]
    streams = [
        asyncio.create_task(one(prompt, sampled, event))
        for (prompt, sampled), event in zip(pairs, events, strict=True)
    ]
    if begun is not None:
        await asyncio.gather(*(event.wait() for event in events))
        await asyncio.to_thread(begun)
    return await asyncio.gather(*streams)


def check_pulled(cluster: LocalCluster, transport: str) -> None:
    """All blocks of the prompts were pulled, unless a lease was lost because the machine is busy.
    The decode worker then computes the prompt."""
    pulled = metric(cluster, "decode-0", "tandem_kv_blocks_pulled_total", transport=transport)
    wanted = sum(len(prompt) // 16 for prompt in PROMPTS)
    lost = metric(cluster, "decode-0", "tandem_local_prefills_total")
    assert pulled >= (1 if lost else wanted)
    assert metric(cluster, "decode-0", "tandem_block_mismatches_total") == 0


def ranks_of(worker: WorkerProcess) -> list[int]:
    """The pids of the worker's ranks but the first."""
    processes = psutil.Process(worker.process.pid).children(recursive=True)
    return [p.pid for p in processes if RANK_MODULE in p.cmdline()]


@pytest.mark.parametrize(
    ("prefill", "decode", "transport"),
    [
        (2, 1, "nixl"),
        (1, 2, "grpc"),
        *(
            pytest.param(*degrees, transport, marks=pytest.mark.slow)
            for degrees in ((2, 1), (1, 2), (2, 4), (4, 2), (1, 4))
            for transport in ("nixl", "grpc")
        ),
    ],
)
async def test_tokens_do_not_depend_on_the_degree(
    prefill: int,
    decode: int,
    transport: str,
    model: str,
    expected: list[list[int]],
    redis_server: EmbeddedRedis,
    tmp_path: Path,
) -> None:
    degrees = {"prefill-0": prefill, "decode-0": decode}
    options = ("--transport", transport, "--verify-blocks", "all", "--local-prefill-max-tokens")
    with workers(redis_server, tmp_path, model, degrees, *options, "0") as cluster:
        for worker in cluster.workers.values():
            assert len(ranks_of(worker)) == degrees[worker.worker_id] - 1
        records = await asyncio.to_thread(cluster.records)
        assert {name: record["num_ranks"] for name, record in records.items()} == degrees
        async with open_client(cluster) as client:
            assert await answers(client) == expected
            assert await answers(client) == expected  # with warm caches
        await asyncio.to_thread(cluster.wait_idle)
        check_pulled(cluster, transport)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), OWN_POOLS])
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
async def test_tokens_do_not_depend_on_the_degree_if_kv_comes_from_tiers(
    prefill: int,
    decode: int,
    tier: str,
    options: tuple[str, ...],
    model: str,
    request: pytest.FixtureRequest,
    redis_server: EmbeddedRedis,
    tmp_path: Path,
) -> None:
    sizes = {
        "host": HOST_TIER,
        "disk": ("--kv-disk-path", str(tmp_path / "kv")),
    }
    num_tokens = PREEMPTED if options else NUM_TOKENS
    alone = request.getfixturevalue("torch_expected" if options else "expected")
    expected = [tokens[:num_tokens] for tokens in alone]
    options += (*sizes[tier], "--kv-tier-policy", "lru", "--num-blocks", str(SMALL_POOL))
    options += ("--verify-blocks", "all", "--local-prefill-max-tokens", "0")
    degrees = {"prefill-0": prefill, "decode-0": decode}
    with workers(redis_server, tmp_path, model, degrees, *options) as cluster:

        def loaded(worker_id: str) -> float:
            return metric(cluster, worker_id, "tandem_kv_tier_blocks_loaded_total", tier=tier)

        async with open_client(cluster) as client:
            assert await answers(client, num_tokens=num_tokens) == expected
            await fill_pools(client, seed=1)
            assert await answers(client, num_tokens=num_tokens) == expected
            assert loaded("decode-0") > 0  # the consumer's tier
            await fill_pools(client, seed=2)
            # The consumer has neither blocks nor copies now.
            assert (await reset(cluster, "decode-0")).keys() == {"decode-0"}
            before, pulled = loaded("prefill-0"), blocks_pulled(cluster)
            assert await answers(client, num_tokens=num_tokens) == expected
            assert loaded("prefill-0") > before  # the producer's tier
            assert blocks_pulled(cluster) > pulled
        await asyncio.to_thread(cluster.wait_idle)
        assert metric(cluster, "decode-0", "tandem_block_mismatches_total") == 0
        if tier == "disk":
            # New workers load the copies that workers of the other degree have written.
            for worker in cluster.workers.values():
                worker.stop()
            for worker_id, degree in degrees.items():
                role = worker_id.partition("-")[0]
                cluster.start_worker(worker_id, role, "--tensor-parallel", str(3 - degree))
            await asyncio.to_thread(cluster.wait_ready)
            async with open_client(cluster) as client:
                assert await answers(client, num_tokens=num_tokens) == expected
            assert loaded("decode-0") > 0
            await asyncio.to_thread(cluster.wait_idle)


async def fill_pools(client: httpx.AsyncClient, seed: int) -> None:
    """Sends new prompts, with twice the tokens for which a pool has room."""
    rng = random.Random(seed)
    for _ in range(2 * SMALL_POOL * 16 // 400):
        prompt = rng.choices(range(100, 40_000), k=400)
        assert [event async for event in stream_completion(client, prompt, max_tokens=1)]


def blocks_pulled(cluster: LocalCluster) -> float:
    return sum(
        metric(cluster, "decode-0", "tandem_kv_blocks_pulled_total", transport=transport)
        for transport in ("nixl", "grpc")
    )


async def reset(cluster: LocalCluster, worker_id: str) -> dict[str, int]:
    """Drops the cached blocks of a worker and their copies. Returns how many blocks by worker."""
    async with httpx.AsyncClient(timeout=30) as client:
        url = f"{cluster.admin_url}/reset_prefix_cache"
        reply = await client.post(url, json={"worker_id": worker_id})
    assert reply.status_code == 200, reply.text
    dropped: dict[str, int] = reply.json()["dropped_blocks"]
    return dropped


@pytest.mark.parametrize(
    ("prefill", "decode", "transport", "num_tokens"),
    [
        (2, 1, "nixl", BEGUN),
        (1, 2, "grpc", BEGUN),
        *(
            pytest.param(*degrees, transport, PREEMPTED, marks=pytest.mark.slow)
            for degrees in ((2, 1), (1, 2), (2, 4), (4, 2), (2, 2))
            for transport in ("nixl", "grpc")
        ),
    ],
)
async def test_tokens_do_not_depend_on_the_degree_if_each_rank_has_a_pool(
    prefill: int,
    decode: int,
    transport: str,
    num_tokens: int,
    model: str,
    torch_expected: list[list[int]],
    redis_server: EmbeddedRedis,
    tmp_path: Path,
) -> None:
    """As on GPUs, where each rank has the KV of its own heads. The pool has no room for all answers
    of PREEMPTED tokens, so some are preempted."""
    degrees = {"prefill-0": prefill, "decode-0": decode}
    options = (*OWN_POOLS, "--transport", transport, "--verify-blocks", "all")
    options += ("--local-prefill-max-tokens", "0")
    options += ("--num-blocks", "60")
    expected = [tokens[:num_tokens] for tokens in torch_expected]
    with workers(redis_server, tmp_path, model, degrees, *options) as cluster:
        async with open_client(cluster) as client:
            assert await answers(client, num_tokens=num_tokens) == expected
            assert await answers(client, num_tokens=num_tokens) == expected  # with warm caches
        await asyncio.to_thread(cluster.wait_idle)
        check_pulled(cluster, transport)
        preempted = metric(cluster, "decode-0", "tandem_preemptions_total")
        assert (preempted > 0) == (num_tokens == PREEMPTED)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), OWN_POOLS])
@pytest.mark.parametrize("num_kv_heads", [2, 1])
@pytest.mark.parametrize(
    ("prefill", "decode", "transport"), [(2, 4, "nixl"), (4, 1, "grpc"), (1, 2, "nixl")]
)
async def test_tokens_do_not_depend_on_the_degree_if_ranks_have_equal_kv_heads(
    prefill: int,
    decode: int,
    transport: str,
    num_kv_heads: int,
    options: tuple[str, ...],
    redis_server: EmbeddedRedis,
    tmp_path: Path,
) -> None:
    """With fewer KV heads than ranks, several ranks have the same head."""
    model = make_model(tmp_path / "model", num_kv_heads=num_kv_heads, intermediate_size=256)
    expected = alone(model, **({"kernels": "torch"} if options else {}))
    degrees = {"prefill-0": prefill, "decode-0": decode}
    options += ("--transport", transport, "--verify-blocks", "all")
    options += ("--local-prefill-max-tokens", "0")
    with workers(redis_server, tmp_path, model, degrees, *options) as cluster:
        async with open_client(cluster) as client:
            for _ in range(2):  # the second time with warm caches
                found = await answers(client, num_tokens=PREEMPTED)
                assert found == [tokens[:PREEMPTED] for tokens in expected]
        await asyncio.to_thread(cluster.wait_idle)
        check_pulled(cluster, transport)


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode", "transport"), [(2, 1, "nixl"), (1, 2, "grpc")])
async def test_ranks_of_torch_kernels_exchange_blocks_with_one_rank(
    prefill: int,
    decode: int,
    transport: str,
    model: str,
    redis_server: EmbeddedRedis,
    tmp_path: Path,
) -> None:
    degrees = {"prefill-0": prefill, "decode-0": decode}
    options = ("--kernels", "torch", "--transport", transport, "--verify-blocks", "all")
    with workers(redis_server, tmp_path, model, degrees, *options) as cluster:
        async with open_client(cluster) as client:
            assert await answers(client) == alone(model, kernels="torch")
        await asyncio.to_thread(cluster.wait_idle)
        assert metric(cluster, "decode-0", "tandem_kv_blocks_pulled_total", transport=transport)
        assert metric(cluster, "decode-0", "tandem_block_mismatches_total") == 0


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("killed", ()),
        ("stopped", ()),
        pytest.param("killed", (*OWN_POOLS, *HOST_TIER), marks=pytest.mark.slow),
        pytest.param("stopped", (*OWN_POOLS, *HOST_TIER), marks=pytest.mark.slow),
    ],
)
async def test_a_rank_that_ends_ends_its_worker_and_no_stream(
    how: str,
    options: tuple[str, ...],
    model: str,
    request: pytest.FixtureRequest,
    redis_server: EmbeddedRedis,
    tmp_path: Path,
) -> None:
    degrees = {"prefill-0": 1, "decode-0": 2, "decode-1": 1}
    num_tokens = PREEMPTED if options else NUM_TOKENS
    expected = request.getfixturevalue("torch_expected" if options else "expected")
    options += ("--engine-hang-timeout", "4")
    with workers(redis_server, tmp_path, model, degrees, *options) as cluster:
        worker = cluster.workers["decode-0"]
        (pid,) = ranks_of(worker)

        def end() -> None:
            os.kill(pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            assert worker.process.wait(20) == 1
            wait_for(lambda: not psutil.pid_exists(pid), deadline_s=5, what="the end of the rank")

        async with open_client(cluster) as client:
            found = await answers(client, end, num_tokens)
        assert found == [tokens[:num_tokens] for tokens in expected]
        assert migrations(cluster, "crash") > 0
        told = {
            "killed": "ended with status -9",
            "stopped": "does not answer: its process was stopped (SIGSTOP) for 4 s",
        }
        last_line = worker.log.read_text().splitlines()[-1]
        assert last_line.endswith(f"rank 1 of the engine {told[how]}")
        del cluster.workers["decode-0"]
        await asyncio.to_thread(cluster.wait_idle)


@pytest.mark.parametrize("killed", ["rank", "engine"])
def test_a_kill_during_the_load_leaves_no_process_and_allows_a_restart(
    killed: str, model: str, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    cluster = LocalCluster(redis_server, tmp_path, model)
    try:
        worker = cluster.start_worker("decode-0", "decode", "--tensor-parallel", "2")
        (pid,) = wait_for(lambda: ranks_of(worker), deadline_s=60, what="a rank")
        rank = psutil.Process(pid)
        (rank if killed == "rank" else rank.parent()).kill()
        assert worker.process.wait(30) == 1
        wait_for(lambda: not rank.is_running(), deadline_s=30, what="the end of the rank")
        text = worker.log.read_text()
        assert "Traceback" not in text
        if killed == "rank":
            assert "rank 1 of the engine ended with status -9 during loading" in text
    finally:
        cluster.close()

"""The prefix caches of real workers are reset while requests run: exact answers, nothing leaked."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import httpx

from tests.harness.client import complete, golden, open_client, stream_completion, tokens_of
from tests.harness.cluster import LocalCluster, wait_for

PROMPTS, EXPECTED = golden(4, 5, 6)  # the last has 487 tokens


def reset(cluster: LocalCluster, **body: str) -> dict[str, int]:
    reply = httpx.post(f"{cluster.admin_url}/reset_prefix_cache", json=body, timeout=30)
    assert reply.status_code == 200, reply.text
    dropped: dict[str, int] = reply.json()["dropped_blocks"]
    return dropped


def cached(cluster: LocalCluster, worker_id: str) -> int:
    state = cluster.workers[worker_id].state()
    assert state.integrity_ok, state.integrity_message
    return state.load.blocks_cached


def is_right(cluster: LocalCluster) -> bool:
    """Returns whether the tree has exactly the blocks that the workers hold."""
    url = f"{cluster.admin_url}/v1/cluster/index/verify"
    workers = httpx.post(url, json={"all": True}, timeout=60).json()["workers"]
    return all(worker["ok"] for worker in workers.values())


async def test_idle_workers_drop_all_blocks_and_compute_the_prompt_again(
    cluster: LocalCluster,
) -> None:
    async with open_client(cluster) as client:
        first = await complete(client, PROMPTS[2], max_tokens=8)
        warm = await complete(client, PROMPTS[2], max_tokens=8)
        assert warm.cached_tokens > 0
        ids = sorted(cluster.workers)
        held = {worker_id: cached(cluster, worker_id) for worker_id in ids}
        assert all(held.values())
        assert await asyncio.to_thread(reset, cluster) == held
        assert [cached(cluster, worker_id) for worker_id in ids] == [0] * len(ids)
        await asyncio.to_thread(
            wait_for, lambda: is_right(cluster), deadline_s=10, what="an empty tree"
        )
        cold = await complete(client, PROMPTS[2], max_tokens=8)
        assert cold.cached_tokens == 0
        assert first.token_ids == warm.token_ids == cold.token_ids == EXPECTED[2][:8]


async def test_requests_that_run_keep_their_blocks(cluster: LocalCluster) -> None:
    async with open_client(cluster) as client:
        streams = [stream_completion(client, prompt) for prompt in PROMPTS]
        events = [[await anext(stream)] for stream in streams]
        done = asyncio.Event()

        async def reset_on_and_on() -> int:
            count = 0
            while not done.is_set() or count < 3:
                await asyncio.to_thread(reset, cluster)
                count += 1
            return count

        resetting = asyncio.create_task(reset_on_and_on())
        before = cluster.workers["decode-0"].state().load
        assert before.blocks_used > 0
        for stream, got in zip(streams, events, strict=True):
            got += [event async for event in stream]
        # New ones come while caches are dropped between any two steps.
        again = await asyncio.gather(*(complete(client, prompt) for prompt in PROMPTS))
        done.set()
        assert await resetting >= 3
    assert [tokens_of(got) for got in events] == EXPECTED
    assert [answer.token_ids for answer in again] == EXPECTED
    await asyncio.to_thread(reset, cluster)
    for worker in cluster.workers.values():
        state = worker.state()
        assert state.integrity_ok, state.integrity_message
        assert (state.load.blocks_used, state.load.blocks_cached) == (0, 0)
        assert state.load.blocks_quarantined == 0
    await asyncio.to_thread(
        wait_for, lambda: is_right(cluster), deadline_s=10, what="a tree that is right"
    )


async def test_the_command_resets_one_worker(cluster: LocalCluster) -> None:
    async with open_client(cluster) as client:
        await complete(client, PROMPTS[2], max_tokens=2)
    held = cached(cluster, "prefill-0")
    assert held
    command = [sys.executable, "-m", "tandem.ops.cli", "reset-prefix-cache", "prefill-0"]
    command += ["--url", cluster.admin_url]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"prefill-0: {held} blocks dropped\n", done.stderr
    assert cached(cluster, "prefill-0") == 0
    assert cached(cluster, "decode-0") > 0

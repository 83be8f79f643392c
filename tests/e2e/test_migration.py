"""A decode worker that leaves, and one that is killed, under streams: each goes on exactly.

One cluster for both, prompts prefilled where that is predicted to be faster. Greedy tokens are a
reference's; those drawn by a seed are what the same request made before without a fault.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import StartCluster
from tests.harness.client import (
    complete,
    golden,
    metric,
    open_client,
    stream_completion,
    tokens_of,
)
from tests.harness.cluster import LocalCluster, wait_for
from tests.harness.poisoned_engine import POISON

NUMBERS = (0, 4, 5, 6)  # prompts of up to 487 tokens
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 7}
NUM_TOKENS = 64
BEGUN = 4  # tokens of each stream when its worker goes


class Streams:
    """All prompts at once, each greedily and drawn by a seed."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.prompts, greedy = golden(*NUMBERS)
        self.greedy = [tokens[:NUM_TOKENS] for tokens in greedy]
        self.sampled: list[list[int]] = []

    async def draw(self, client: httpx.AsyncClient) -> None:
        """Without a fault: what the sampled ones make, to compare with."""
        done = await asyncio.gather(*self._begin(client, [], SAMPLED))
        self.sampled = [tokens_of(events) for events in done]
        assert self.sampled != self.greedy

    async def run_through(self, client: httpx.AsyncClient, fault: Any) -> None:
        """`fault` comes when all have begun; they end as if it had not."""
        begun: list[asyncio.Event] = []
        streams = [asyncio.create_task(s) for s in self._begin(client, begun, {}, SAMPLED)]
        await asyncio.gather(*(event.wait() for event in begun))
        await asyncio.to_thread(fault)
        self._check(await asyncio.gather(*streams), [*self.greedy, *self.sampled])

    def _begin(
        self, client: httpx.AsyncClient, begun: list[asyncio.Event], *kinds: dict[str, Any]
    ) -> list[Any]:
        found = []
        for fields in kinds:
            for prompt in self.prompts:
                begun.append(asyncio.Event())
                found.append(self._collect(client, prompt, begun[-1], fields))
        return found

    async def _collect(
        self,
        client: httpx.AsyncClient,
        prompt: list[int],
        begun: asyncio.Event,
        fields: dict[str, Any],
    ) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        asked = {"max_tokens": NUM_TOKENS, "stream_options": {"include_usage": True}, **fields}
        async for event in stream_completion(client, prompt, **asked):
            events.append(event)
            if len(tokens_of(events)) >= BEGUN:
                begun.set()
        return events

    def _check(self, done: list[list[dict[str, Any]]], expected: list[list[int]]) -> None:
        assert [tokens_of(events) for events in done] == expected
        for events, prompt in zip(done, self.prompts * 2, strict=False):
            usage = events[-1]["usage"]
            counts = (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"])
            assert counts == (len(prompt), NUM_TOKENS, len(prompt) + NUM_TOKENS)
            assert usage["prompt_tokens_details"]["cached_tokens"] < len(prompt)


def moves(cluster: LocalCluster, reason: str) -> int:
    page = httpx.get(f"{cluster.url}/metrics").text
    name = f'tandem:request_moves_total{{reason="{reason}"}} '
    return round(float(page.split(name)[1].split()[0]))


def pulled(cluster: LocalCluster, worker_id: str) -> float:
    """Blocks that came by a lease of a prefill worker, and those that came by their hashes."""
    names = ("tandem_kv_blocks_pulled_total", "tandem_prefix_blocks_pulled_total")
    return sum(metric(cluster, worker_id, name) for name in names)


async def test_streams_go_on_when_their_decode_worker_leaves_or_dies(
    start_cluster: StartCluster,
) -> None:
    with start_cluster("--prefill-at", "auto") as cluster:
        streams = Streams(cluster)
        async with open_client(cluster) as client:
            # It is not there yet: the prompts are computed at the other one, and go there again.
            cluster.start_worker("decode-1", "decode")
            await streams.draw(client)
            await asyncio.to_thread(cluster.wait_ready)
            wait_for(
                lambda: "decode-0" in cluster.records()["decode-1"]["transports"],
                deadline_s=20,
                what="the pair of the decode workers",
            )
            leaving = cluster.workers["decode-0"]

            def drain() -> None:
                command = [sys.executable, "-m", "services.cli", "drain", "decode-0"]
                command += ["--url", cluster.url, "--deadline", "60"]
                subprocess.run(command, check=True, timeout=90)
                assert leaving.process.wait(30) == 0
                cluster.start_worker("decode-0", "decode")

            await streams.run_through(client, drain)
            num_moved, num_pulled = moves(cluster, "drain"), pulled(cluster, "decode-1")
            computed = metric(cluster, "decode-1", "tandem_prefill_tokens_total")
            print(f"{num_moved} moved, {num_pulled:g} blocks pulled, {computed:g} tokens computed")
            assert num_moved > 0
            assert num_pulled >= num_moved
            assert computed < num_moved * 80
            await asyncio.to_thread(cluster.wait_ready)
            await asyncio.to_thread(cluster.wait_idle)

            await streams.run_through(client, cluster.workers["decode-1"].kill)
            assert moves(cluster, "crash") > 0
            assert moves(cluster, "drain") == num_moved
            del cluster.workers["decode-1"]
            await asyncio.to_thread(cluster.wait_idle)


@pytest.mark.slow
@pytest.mark.parametrize("at", ["decode", "prefill"])
async def test_a_request_that_kills_its_worker_kills_three(
    start_cluster: StartCluster, at: str
) -> None:
    (prompt,), (greedy,) = golden(5)
    forced = "remote" if at == "prefill" else "local"
    with start_cluster("--prefill-at", forced, prefill=0, decode=0) as cluster:
        module = ("tests.harness.poisoned_engine", "worker")
        for worker_id, role in (("prefill-0", "prefill"), ("decode-0", "decode")):
            cluster.start_worker(worker_id, role, module=module)
        await asyncio.to_thread(cluster.wait_ready)
        ends = 0
        async with open_client(cluster) as client:
            body = {"prompt": [*prompt, POISON], "max_tokens": 8}
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            while not asking.done():
                for worker_id, worker in list(cluster.workers.items()):
                    if worker.process.poll() is not None:  # started again, as an agent would
                        ends += 1
                        cluster.start_worker(worker_id, worker.role, module=module)
                await asyncio.sleep(0.05)
            answer = asking.result()
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "worker_lost"
            assert "3 workers were lost under this request" in answer.json()["error"]["message"]
            dead = [w for w in cluster.workers.values() if w.process.poll() is not None]
            assert ends + len(dead) == 3
            for worker in dead:
                cluster.start_worker(worker.worker_id, worker.role, module=module)
            await asyncio.to_thread(cluster.wait_ready)
            well = await complete(client, prompt, max_tokens=8)
            assert well.token_ids == greedy[:8]

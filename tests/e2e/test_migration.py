"""A decode worker that leaves, and one that is killed, under streams: each goes on exactly.

One cluster for both, prompts prefilled where that is predicted to be faster. Greedy tokens are a
reference's; those drawn by a seed are what the same request made before without a fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import httpx
import pytest

from tandem.cluster.operate import drain_worker
from tests.e2e.conftest import StartCluster
from tests.harness.client import (
    EDITED,
    complete_all,
    golden,
    metric,
    migrations,
    open_client,
    stream_completion,
    tokens_of,
)
from tests.harness.cluster import LocalCluster, wait_for
from tests.harness.poisoned_engine import POISON

NUMBERS = (0, 4, 5, 6)  # prompts of up to 487 tokens
SAMPLED = {**EDITED, "logprobs": 1}  # drawn by a seed, from edited logits
# Half of the others are a list of integers that is longer than they are.
NUMBERS_FORM = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 200}
LISTED = {**SAMPLED, "guided_json": NUMBERS_FORM}
# The longest prompt's: blocks leave it before it moves, and after.
BUDGETED = {**LISTED, "kv_budget": {"policy": "heavy_hitters", "tokens": 224}}
KINDS: list[dict[str, Any]] = [{}] * len(NUMBERS) + [SAMPLED, LISTED, SAMPLED, BUDGETED]
NUM_TOKENS = 64  # of the greedy ones: what the reference has
NUM_DRAWN = 192  # of the others: on a slow machine, too, enough are left when all have begun
BEGUN = 4  # tokens of each stream when its worker goes


def logprobs_of(events: Iterable[dict[str, Any]]) -> list[float]:
    """All log probabilities that the events of a streamed completion brought."""
    return [
        one
        for event in events
        for choice in event["choices"]
        for one in choice["logprobs"]["token_logprobs"]
    ]


class Streams:
    """Eight requests at once: four greedy ones, and four drawn by a seed, of other prompts."""

    def __init__(self) -> None:
        prompts, greedy = golden(*NUMBERS)
        # No two share a block: what one worker has of one is no help to another.
        self.prompts = [*prompts, *(prompt[1:] for prompt in prompts)]
        self.expected = [tokens[:NUM_TOKENS] for tokens in greedy]
        self.ids: list[str] = []
        self.restarted: list[bool] = []  # whose usage has the mark
        self.logprobs: list[list[float]] = []  # of the drawn ones

    async def draw(self, client: httpx.AsyncClient) -> None:
        """Without a fault: what the seed makes, to compare with."""
        drawn = [
            self._collect(client, prompt, asyncio.Event(), kind)
            for prompt, kind in list(zip(self.prompts, KINDS, strict=True))[len(NUMBERS) :]
        ]
        events = await asyncio.gather(*drawn)
        self.expected += [tokens_of(of_one) for of_one in events]
        self.logprobs = [logprobs_of(of_one) for of_one in events]

    async def run_through(self, client: httpx.AsyncClient, fault: Callable[[], object]) -> None:
        """`fault` comes when all have begun; they end as if it had not."""
        begun = [asyncio.Event() for _ in self.prompts]
        streams = [
            asyncio.create_task(self._collect(client, *of_one))
            for of_one in zip(self.prompts, begun, KINDS, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        await asyncio.to_thread(fault)
        done = await asyncio.gather(*streams)
        assert [tokens_of(events) for events in done] == self.expected
        for events, expected in zip(done[len(NUMBERS) :], self.logprobs, strict=True):
            # A moved sequence computes its KV anew, and in fp32 a last bit may differ.
            assert logprobs_of(events) == pytest.approx(expected, abs=1e-5)
        self.ids = [events[0]["id"] for events in done]
        self.restarted = ["budget_restarted" in events[-1]["usage"] for events in done]
        for events, prompt, made in zip(done, self.prompts, self.expected, strict=True):
            usage = events[-1]["usage"]
            counts = (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"])
            assert counts == (len(prompt), len(made), len(prompt) + len(made))
            assert usage["prompt_tokens_details"]["cached_tokens"] < len(prompt)

    async def _collect(
        self,
        client: httpx.AsyncClient,
        prompt: list[int],
        begun: asyncio.Event,
        fields: dict[str, Any],
    ) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        max_tokens = NUM_DRAWN if fields else NUM_TOKENS
        asked = {"max_tokens": max_tokens, "stream_options": {"include_usage": True}, **fields}
        async for event in stream_completion(client, prompt, **asked):
            events.append(event)
            if len(tokens_of(events)) >= BEGUN:
                begun.set()
        return events


DECODE_WORKERS = ("decode-0", "decode-1")


def by_streams(cluster: LocalCluster) -> tuple[str, str]:
    """The decode worker that has most of the streams now, and the other one."""
    other, most = sorted(
        DECODE_WORKERS, key=lambda worker: metric(cluster, worker, "tandem_num_running")
    )
    return most, other


class Work:
    """The work of one worker for prompts whose KV it did not have."""

    def __init__(self, cluster: LocalCluster, worker_id: str) -> None:
        def total(*names: str) -> float:
            return sum(metric(cluster, worker_id, name) for name in names)

        # By a lease of a prefill worker, and by their hashes.
        self.blocks_pulled = total(
            "tandem_kv_blocks_pulled_total", "tandem_prefix_blocks_pulled_total"
        )
        self.tokens_computed = total("tandem_prefill_tokens_total")


def computed_max(stayed: list[int], *, num_tried: int) -> int:
    """Returns how many tokens the worker that stays may compute, with prompts `stayed` of its own.

    `num_tried` streams were on the worker that leaves. Each is submitted to the one that stays,
    also a stream that then ends where it was, as those do that are far ahead. Each computes

    - up to 80 tokens: what its last block lacks, or a prompt that is too short to pull;
    - all its tokens if it is under a KV budget: that KV is no other sequence's.
    """
    under_budget = len(Streams().prompts[-1]) + NUM_DRAWN
    return sum(stayed) + 80 * num_tried + under_budget


async def test_streams_go_on_when_their_decode_worker_leaves_or_dies(
    start_cluster: StartCluster,
) -> None:
    with start_cluster("--prefill-at", "auto", decode=2) as cluster:
        streams = Streams()
        async with open_client(cluster) as client:
            await streams.draw(client)
            wait_for(
                lambda: all(
                    other in cluster.records()[one]["transports"]
                    for one, other in (DECODE_WORKERS, DECODE_WORKERS[::-1])
                ),
                deadline_s=20,
                what="the pair of the decode workers",
            )
            before = {worker: Work(cluster, worker) for worker in DECODE_WORKERS}
            left = ""
            stays = ""

            def drain() -> None:
                nonlocal left, stays
                left, stays = by_streams(cluster)
                leaving = cluster.workers[left]
                drain_worker(cluster.admin_url, left, deadline_s=60)  # as `tandem drain` does
                assert leaving.process.wait(30) == 0
                cluster.start_worker(left, "decode")

            await streams.run_through(client, drain)
            num_moved = migrations(cluster, "drain")
            moved, stayed = [], []  # prompts that came by a move, and those that were there before
            new_blocks = 0  # of moved prompts that nobody had drawn before, too long to compute
            asked = zip(streams.ids, streams.prompts, strict=True)
            for i, (request_id, prompt) in enumerate(asked):
                record = (await client.get(f"/v1/requests/{request_id}")).json()
                assert streams.restarted[i] == (KINDS[i] is BUDGETED and record["moves"] > 0)
                if record["decode_worker"] == stays:
                    (moved if record["moves"] else stayed).append(len(prompt))
                    if record["moves"] and i < len(NUMBERS) and len(prompt) > 80:
                        new_blocks += len(prompt) // 16
            assert len(moved) == num_moved > 0
            work = Work(cluster, stays)
            num_pulled = work.blocks_pulled - before[stays].blocks_pulled
            computed = work.tokens_computed - before[stays].tokens_computed
            print(f"prompts moved {moved}, stayed {stayed}: {num_pulled:g} blocks pulled,")
            print(f"{computed:g} tokens computed")
            assert num_pulled >= new_blocks
            assert computed <= computed_max(stayed, num_tried=len(streams.ids) - len(stayed))
            await asyncio.to_thread(cluster.wait_ready)
            await asyncio.to_thread(cluster.wait_idle)

            def kill() -> None:
                nonlocal left
                left, _ = by_streams(cluster)
                cluster.workers[left].kill()

            await streams.run_through(client, kill)
            assert migrations(cluster, "crash") > 0
            assert migrations(cluster, "drain") == num_moved
            del cluster.workers[left]
            await asyncio.to_thread(cluster.wait_idle)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("prefill", "prefill_at"), [(0, "local"), (1, "remote")])
async def test_a_request_that_kills_its_worker_kills_three(
    start_cluster: StartCluster, prefill: int, prefill_at: str
) -> None:
    """Three decode workers, or the one that prefills and then two that do it themselves."""
    (prompt,), (greedy,) = golden(5)
    module = ("tests.harness.poisoned_engine", "worker")
    with start_cluster("--prefill-at", prefill_at, prefill=0, decode=0) as cluster:
        for role, count in (("prefill", prefill), ("decode", 3 - prefill)):
            for number in range(count):
                cluster.start_worker(f"{role}-{number}", role, module=module)
        await asyncio.to_thread(cluster.wait_ready)
        async with open_client(cluster) as client:
            body = {"prompt": [*prompt, POISON], "max_tokens": 8}
            answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 503
        error = answer.json()["error"]
        assert error["code"] == "worker_lost"
        assert "3 workers were lost while this request ran" in error["message"]
        for worker in cluster.workers.values():
            assert await asyncio.to_thread(worker.process.wait, 10) == 1
        cluster.workers.clear()
        cluster.start_worker("decode-0", "decode")
        await asyncio.to_thread(cluster.wait_ready)
        (again,) = await complete_all(cluster, [prompt], max_tokens=8)
        assert again.token_ids == greedy[:8]

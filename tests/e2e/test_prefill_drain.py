"""A prefill worker that leaves under load, whose prefixes every request shares."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest

from tests.e2e.conftest import StartCluster
from tests.harness.client import complete, golden, metric, open_client
from tests.harness.cluster import wait_for

NUM_CLIENTS = 16
DRAIN_DEADLINE_S = 60
OPTIONS = ("--transport", "nixl", "--drain-deadline", str(DRAIN_DEADLINE_S))


@pytest.mark.slow
async def test_its_drain_ends_though_requests_go_on(start_cluster: StartCluster) -> None:
    prompts, expected = golden(0, 4, 5, 6)
    with start_cluster(*OPTIONS, prefill=2) as cluster:
        over = asyncio.Event()
        num_answers = 0

        async def ask(client: httpx.AsyncClient, number: int) -> None:
            nonlocal num_answers
            draw = random.Random(number)
            while not over.is_set():
                tail = [draw.randrange(1000, 40_000) for _ in range(160)]  # nobody has its blocks
                answer = await complete(client, [*prompts[1][:256], *tail], max_tokens=4)
                assert len(answer.token_ids) == 4
                num_answers += 1

        async with open_client(cluster) as client:
            asking = [asyncio.create_task(ask(client, n)) for n in range(NUM_CLIENTS)]
            leaving = cluster.workers["prefill-0"]
            load = lambda: num_answers >= 2 * NUM_CLIENTS  # noqa: E731
            await asyncio.to_thread(wait_for, load, deadline_s=120, what="load")
            computed = metric(cluster, "prefill-0", "tandem_prefill_tokens_total")
            assert computed > 0
            leaving.process.terminate()
            # The deadline's own end would be later.
            assert await asyncio.to_thread(leaving.process.wait, DRAIN_DEADLINE_S - 15) == 0
            del cluster.workers["prefill-0"]
            at_end = num_answers
            await asyncio.to_thread(
                wait_for, lambda: num_answers > at_end + 20, deadline_s=120, what="answers"
            )
            over.set()
            await asyncio.gather(*asking)
            words = leaving.log.read_text()
            assert "drained in" in words
            print(next(line for line in words.splitlines() if "drained in" in line))
            assert "drain deadline" not in words
            answer = await complete(client, prompts[1])
            assert answer.token_ids == expected[1]
        cluster.wait_idle()

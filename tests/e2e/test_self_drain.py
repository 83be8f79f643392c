"""A worker that can pull no more ends itself, so that whoever keeps workers starts it anew."""

from __future__ import annotations

import asyncio

from tests.e2e.conftest import StartCluster
from tests.harness.client import complete_all, golden, metric
from tests.harness.cluster import wait_for

OPTIONS = ("--transport", "nixl", "--prefill-at", "remote", "--local-prefill-max-tokens", "0")


async def test_a_worker_whose_transfer_thread_broke_finishes_what_it_has_and_ends(
    start_cluster: StartCluster,
) -> None:
    prompts, expected = golden(5, 6)
    with start_cluster(*OPTIONS, prefill=1, decode=0) as cluster:
        module = ("tests.harness.breaking_engine", "worker")
        broken = cluster.start_worker("decode-0", "decode", module=module)
        cluster.wait_ready()
        asking = asyncio.create_task(complete_all(cluster, prompts, max_tokens=48))
        await asyncio.to_thread(
            wait_for,
            lambda: cluster.records().get("decode-0", {}).get("state") == "draining",
            deadline_s=60,
            what="the drain",
        )
        assert broken.process.poll() is None, "it has sequences to finish"
        assert metric(cluster, "decode-0", "tandem_pull_failures_total", reason="broken") >= 1
        answers = await asking
        assert [a.token_ids for a in answers] == [tokens[:48] for tokens in expected]
        assert await asyncio.to_thread(broken.process.wait, 60) == 1
        assert "this worker drains itself: the transfer thread is broken" in broken.log.read_text()
        wait_for(lambda: "decode-0" not in cluster.records(), deadline_s=10, what="its leaving")

        cluster.start_worker("decode-0", "decode")  # as its agent would
        cluster.wait_ready()
        again = await complete_all(cluster, prompts[:1], max_tokens=8)
        assert again[0].token_ids == expected[0][:8]
        assert metric(cluster, "decode-0", "tandem_kv_blocks_pulled_total", transport="nixl") > 0
        cluster.wait_idle()

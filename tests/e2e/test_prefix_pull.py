"""Finished blocks go from any worker to any: a chat's second turn, and a worker that starts warm.

Greedy tokens of a reference entry are the oracle: its prompt and some of those tokens are a chat so
far, and the answer must be the tokens after them.
"""

from __future__ import annotations

import pytest

from tests.e2e.conftest import StartCluster
from tests.harness.client import complete_all, golden, metric
from tests.harness.cluster import LocalCluster, wait_for

REMOTE_ALL = ("--prefill-at", "remote", "--local-prefill-max-tokens", "0")


def start_connected(cluster: LocalCluster, worker_id: str, *options: str) -> None:
    """A new prefill worker that is ready and reads from the decode worker."""
    cluster.start_worker(worker_id, "prefill", *options)
    cluster.wait_ready(worker_id)
    wait_for(
        lambda: "decode-0" in cluster.records()[worker_id]["transports"],
        deadline_s=20,
        what=f"a connection of {worker_id} to the decode worker",
    )


def leave(cluster: LocalCluster, worker_id: str) -> None:
    cluster.workers.pop(worker_id).stop()
    wait_for(lambda: worker_id not in cluster.records(), deadline_s=20, what="its leaving")


@pytest.mark.parametrize("transport", ["nixl", pytest.param("grpc", marks=pytest.mark.slow)])
async def test_a_turn_starts_from_what_another_worker_has(
    start_cluster: StartCluster, transport: str
) -> None:
    (prompt,), (answer,) = golden(6)
    with start_cluster("--transport", transport, *REMOTE_ALL) as cluster:
        first = (await complete_all(cluster, [prompt], max_tokens=32))[0]
        assert first.token_ids == answer[:32]

        # A prefill worker that has nothing: the decode worker has the prompt and what it made.
        start_connected(cluster, "prefill-1")
        leave(cluster, "prefill-0")
        second = (await complete_all(cluster, [[*prompt, *answer[:48]]], max_tokens=8))[0]
        assert second.token_ids == answer[48:56]
        num_blocks = (len(prompt) + 31) // 16
        pulled = metric(
            cluster, "prefill-1", "tandem_prefix_blocks_pulled_total", transport=transport
        )
        assert pulled == num_blocks
        assert second.cached_tokens == num_blocks * 16
        computed = metric(cluster, "prefill-1", "tandem_prefill_tokens_total")
        assert computed == len(prompt) + 48 - num_blocks * 16
        cluster.wait_idle()

        # One that starts warm has them before anybody asks.
        start_connected(cluster, "prefill-2", "--warm-blocks", "100")
        wait_for(
            lambda: metric(cluster, "prefill-2", "tandem_blocks_warmed_total") >= num_blocks,
            deadline_s=20,
            what="its warmth",
        )
        leave(cluster, "prefill-1")
        third = (await complete_all(cluster, [[*prompt, *answer[:56]]], max_tokens=8))[0]
        assert third.token_ids == answer[56:64]
        computed = metric(cluster, "prefill-2", "tandem_prefill_tokens_total")
        assert computed <= len(prompt) + 56 - num_blocks * 16
        assert metric(cluster, "decode-0", "tandem_local_prefills_total") == 0
        cluster.wait_idle()

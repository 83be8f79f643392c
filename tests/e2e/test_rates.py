"""The rates that workers measure of themselves and their pairs, as other processes see them."""

from __future__ import annotations

from redis.asyncio import Redis

from tandem.common.config.cluster import ClusterConfig
from tandem.net.store.registry import Registry, WorkerRecord
from tests.e2e.conftest import StartCluster
from tests.harness.client import complete_all, golden, metric
from tests.harness.cluster import LocalCluster


async def records(cluster: LocalCluster) -> dict[str, WorkerRecord]:
    redis = Redis.from_url(cluster.redis.url)
    try:
        config = ClusterConfig(cluster.cluster_id, cluster.redis.url, cluster.token)
        return {r.worker_id: r for r in await Registry(redis, config).read()}
    finally:
        await redis.aclose()


async def test_rates_appear_in_records_state_and_metrics_and_place_prompts(
    start_cluster: StartCluster,
) -> None:
    prompts, expected = golden(4, 5, 6)
    assert max(map(len, prompts)) > 64
    with start_cluster("--prefill-at", "auto", "--transport", "auto") as cluster:
        for _ in range(2):
            answers = await complete_all(cluster, prompts, max_tokens=16)
            assert [a.token_ids for a in answers] == [tokens[:16] for tokens in expected]
        # Each worker may compute some of these, and rates count as measured after eight steps.
        for n in range(16):
            await complete_all(cluster, [[300 + n, *prompts[0]]], max_tokens=1)
        assert metric(cluster, "decode-0", "tandem_prefill_choices_total", turn="first") > 0
        state = cluster.workers["decode-0"].state()
        assert state.transports["prefill-0"] == "nixl"
        assert state.rates["prefill-0"].bytes_per_s > 1e6
        # All workers that can hold blocks are read from.
        assert "decode-0" in cluster.workers["prefill-0"].state().rates
        assert 0 < metric(cluster, "decode-0", "tandem_pair_latency_seconds", peer="prefill-0") < 10
        assert metric(cluster, "decode-0", "tandem_pair_bytes_per_second", peer="prefill-0") > 1e6
        known = await records(cluster)
        pair = known["decode-0"].pairs["prefill-0"]
        assert pair.transport == "nixl"
        assert 0 < pair.seconds(1 << 20) < 10
        rates = [r.rates for r in known.values()]
        assert any(r.measured for r in rates)
        assert all(r.block_bytes == 720 << 10 for r in rates)
        # A CPU core makes between 10 and 100,000 tokens a second of this model.
        assert all(512 / 1e5 < r.prefill.seconds(512) < 51.2 for r in rates)
        assert known["decode-0"].rates.decode.seconds(1) > 0
        cluster.wait_idle()

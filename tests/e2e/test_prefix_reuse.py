"""A repeated long prompt: its cached tokens are in `usage`, and its blocks do not travel again."""

from __future__ import annotations

from tests.harness.client import complete_all, golden, metric
from tests.harness.cluster import LocalCluster


async def test_repeated_prompt_of_1500_tokens(cluster: LocalCluster) -> None:
    base = golden(7)[0][0]
    prompt = [11, *base, *base][:1500]  # shares no block with any other test

    def moved() -> float:
        return metric(cluster, "decode-0", "tandem_kv_bytes_pulled_total", transport="nixl")

    first = (await complete_all(cluster, [prompt], max_tokens=4))[0]
    once = moved()
    again = (await complete_all(cluster, [prompt], max_tokens=4))[0]
    assert once > 0
    assert moved() - once < once
    assert first.cached_tokens == 0
    assert again.cached_tokens == 1488  # 93 full blocks; the tokens after them are computed
    assert again.token_ids == first.token_ids
    cluster.wait_idle()


async def test_a_longer_turn_moves_only_what_is_new(cluster: LocalCluster) -> None:
    prompt = golden(6)[0][0]
    first = (await complete_all(cluster, [prompt], max_tokens=16))[0]
    before = metric(cluster, "decode-0", "tandem_kv_blocks_pulled_total", transport="nixl")
    turn = [*prompt, *first.token_ids, *golden(5)[0][0]]
    second = (await complete_all(cluster, [turn], max_tokens=4))[0]
    after = metric(cluster, "decode-0", "tandem_kv_blocks_pulled_total", transport="nixl")
    cached_blocks = (len(prompt) + len(first.token_ids) - 1) // 16
    assert second.cached_tokens == cached_blocks * 16
    assert after - before == -(-len(turn) // 16) - cached_blocks
    cluster.wait_idle()

"""Two tenants with the same prompt share nothing: neither blocks of a worker nor of its peers."""

from __future__ import annotations

import httpx

from tests.harness.client import DEADLINE_S, Answer, complete, golden, open_client
from tests.harness.cluster import LocalCluster


async def test_two_tenants_with_the_same_prompt_share_nothing(cluster: LocalCluster) -> None:
    prompt = [23, *golden(6)[0][0]]  # shares no block with any other test
    full = (len(prompt) - 1) // 16 * 16
    with cluster.another_router("--trust-tenant-header") as url:

        async def ask(tenant: str) -> Answer:
            headers = {"x-tandem-tenant": tenant} if tenant else {}
            async with httpx.AsyncClient(
                base_url=url, timeout=DEADLINE_S, headers=headers
            ) as client:
                return await complete(client, prompt, max_tokens=8)

        first = await ask("acme")
        assert first.cached_tokens == 0
        assert (await ask("acme")).cached_tokens == full
        for other in ("other", ""):
            answer = await ask(other)
            assert answer.cached_tokens == 0
            assert answer.token_ids == first.token_ids
        assert (await ask("other")).cached_tokens == full
    # The cluster's own router trusts no header: who sends one shares with those who send none.
    async with open_client(cluster) as client:
        client.headers["x-tandem-tenant"] = "acme"
        again = await complete(client, prompt, max_tokens=8)
    assert again.cached_tokens == full
    cluster.wait_idle()

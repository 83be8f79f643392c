"""KV that a client wants to find again is pinned on both workers of its request."""

from __future__ import annotations

from typing import Any

import httpx

from tests.harness.client import DEADLINE_S, golden, metric
from tests.harness.cluster import LocalCluster, wait_for


def test_both_workers_pin_what_is_to_be_kept(cluster: LocalCluster) -> None:
    prompt = [29, *golden(6)[0][0]]  # shares no block with any other test
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "prompt_cache_retention": "24h"}
    url = f"{cluster.url}/v1/completions"
    refused = httpx.post(url, json={**body, "prompt_cache_retention": "1h"}, timeout=DEADLINE_S)
    assert refused.status_code == 400
    assert "must be in_memory or 24h" in refused.json()["error"]["message"]
    answer = httpx.post(url, json=body, timeout=DEADLINE_S).json()

    def kept() -> dict[str, Any]:
        record = httpx.get(f"{cluster.url}/v1/requests/{answer['id']}", timeout=DEADLINE_S).json()
        found: dict[str, Any] = record["kept"]
        return found

    wait_for(
        lambda: kept()["tokens"] or kept()["why_not"], deadline_s=60, what="the worker's answer"
    )
    told = kept()
    assert told["why_not"] == ""
    assert told["tokens"] == told["tokens_asked"] >= len(prompt) // 16 * 16
    assert told["seconds"] == 86_400
    cluster.wait_idle()
    name = "tandem_kv_pinned_blocks"  # those of other tests, too
    assert metric(cluster, "decode-0", name, place="device") >= told["tokens"] // 16
    assert metric(cluster, "prefill-0", name, place="device") >= len(prompt) // 16

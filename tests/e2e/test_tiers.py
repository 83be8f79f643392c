"""A chat whose blocks have left a worker's pool returns to that worker, which loads them."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.models.source import resolve
from tests.e2e.conftest import StartCluster, running_cluster
from tests.harness.client import golden, metric
from tests.harness.cluster import LocalCluster, wait_for
from tests.tiny_models import make_tiny_model

PLACEMENT = "x-tandem-placement"
HELD = "tandem_kv_tier_blocks_held"
WRITTEN = "tandem_kv_tier_blocks_written_total"
NUM_BLOCKS = 20  # of a pool; the chat and its answer take 13


def ask(
    cluster: LocalCluster, prompt: list[int], max_tokens: int, *, session: str = ""
) -> tuple[dict[str, Any], str]:
    """Returns the answer, and the worker that decoded it. A tier copies the prompt at once if it is
    of a session."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(
        f"{cluster.url}/v1/completions",
        json={**body, "return_token_ids": True},
        headers={PLACEMENT: "1"} | ({"x-session-id": session} if session else {}),
        timeout=240,
    )
    assert answer.status_code == 200, answer.text
    worker = answer.headers[PLACEMENT].split("decode=")[1].split()[0]
    return answer.json(), worker


def push_out(cluster: LocalCluster, worker_id: str) -> None:
    """Has the worker compute prompts that fill its pool twice."""
    rng = random.Random(7)
    name = "tandem_prefill_tokens_total"
    enough = metric(cluster, worker_id, name) + 2 * NUM_BLOCKS * 16
    for _ in range(20):
        ask(cluster, [rng.randrange(100, 40_000) for _ in range(10 * NUM_BLOCKS)], 1)
        if metric(cluster, worker_id, name) >= enough:
            return
    raise AssertionError(f"{worker_id} got too few prompts")


def test_a_chat_returns_to_the_worker_that_can_load_it(
    start_cluster: StartCluster, tmp_path: Path
) -> None:
    (prompt,), (expected,) = golden(5)
    options = ("--num-blocks", str(NUM_BLOCKS), "--kv-disk-path", str(tmp_path / "kv"))
    with start_cluster("--prefill-at", "local", *options, prefill=0, decode=2) as cluster:
        first, chosen = ask(cluster, prompt, 32, session="chat")
        assert first["choices"][0]["token_ids"] == expected[:32]
        wait_for(
            lambda: metric(cluster, chosen, WRITTEN) >= len(prompt) // 16,
            deadline_s=120,
            what="a copy of the chat's blocks",
        )
        push_out(cluster, chosen)
        again, returned = ask(cluster, [*prompt, *expected[:32]], 8)
        assert returned == chosen
        assert again["choices"][0]["token_ids"] == expected[32:40]
        details = again["usage"]["prompt_tokens_details"]
        by_tier = details["cached_tokens_by_tier"]
        assert by_tier["disk"] > 0
        assert sum(by_tier.values()) == details["cached_tokens"] >= len(prompt) // 16 * 16
        assert verified(cluster)[chosen] > NUM_BLOCKS  # those of its tier, too
        wait_for(lambda: shows_tier(cluster, chosen), deadline_s=30, what="the tier on the page")


def shows_tier(cluster: LocalCluster, worker_id: str) -> bool:
    """Returns whether the router tells operators what the worker's disk holds, as its own metrics
    do, and the page's charts have a share of it."""
    workers = httpx.get(f"{cluster.admin_url}/v1/cluster").json()["workers"]
    (tiers,) = (worker["tiers"] for worker in workers if worker["worker_id"] == worker_id)
    names = {"blocks_total": "tandem_kv_tier_blocks", "blocks_held": HELD}
    expected = {told: metric(cluster, worker_id, name) for told, name in names.items()}
    assert [tier["name"] for tier in tiers] == ["disk"]
    with httpx.stream("GET", f"{cluster.admin_url}/v1/cluster/live") as feed:
        data = next(line for line in feed.iter_lines() if line.startswith("data: "))
    page = json.loads(data.removeprefix("data: "))
    column = page["sample_columns"].index("kv_disk_share")
    return {**tiers[0], **expected} == tiers[0] and any(s[column] for s in page["samples"])


@pytest.mark.slow
def test_the_tree_knows_what_a_tier_has_of_windows(
    redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    """The model is too small for loads to be worth their time, so its chats go anywhere."""
    path = tmp_path / "model"
    make_tiny_model("gemma3", path, vocab_size=49_152, max_position_embeddings=2048)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve("smollm2").path / name, path)
    options = ("--num-blocks", str(NUM_BLOCKS), "--kv-disk-path", str(tmp_path / "kv"))
    rng = random.Random(8)
    prompt = [rng.randrange(100, 40_000) for _ in range(170)]
    with running_cluster(
        redis_server, tmp_path, "--prefill-at", "local", *options, model=str(path), prefill=0
    ) as cluster:
        first, chosen = ask(cluster, prompt, 40, session="chat")
        tokens = first["choices"][0]["token_ids"]
        push_out(cluster, chosen)
        again, _ = ask(cluster, [*prompt, *tokens[:32]], 8)
        assert again["choices"][0]["token_ids"] == tokens[32:]
        assert metric(cluster, chosen, WRITTEN) > 0
        assert verified(cluster)[chosen] > 0


def verified(cluster: LocalCluster) -> dict[str, int]:
    """Returns how many blocks the tree has rightly of each worker."""
    cluster.wait_idle()
    verify = f"{cluster.admin_url}/v1/cluster/index/verify"
    found = httpx.post(verify, json={"all": True}, timeout=60).json()["workers"]
    assert found
    assert all(worker["ok"] for worker in found.values()), found
    return {name: worker["checked"] for name, worker in found.items()}

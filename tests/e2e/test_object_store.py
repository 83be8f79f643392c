"""Whole clusters whose workers share an object store, which outlives them all and may fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("obstore")
pytest.importorskip("moto")

from tandem.cluster.launch.embedded_redis import EmbeddedRedis
from tests.e2e.conftest import running_cluster
from tests.harness.client import golden
from tests.harness.cluster import LocalCluster, wait_for
from tests.harness.object_store import BUCKET, ObjectStoreServer

PLACEMENT = "x-tandem-placement"
DEADLINE_S = 120.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectStoreServer]:
    server = ObjectStoreServer(tmp_path)
    yield server
    server.kill()


@contextmanager
def cluster_with(
    store: ObjectStoreServer, folder: Path, *options: str, **sizes: Any
) -> Iterator[tuple[LocalCluster, EmbeddedRedis]]:
    """A cluster with a Redis of its own."""
    credentials = folder / "credentials"
    credentials.touch(0o600)
    credentials.write_text("[default]\naws_access_key_id = test\naws_secret_access_key = test\n")
    options += ("--kv-store-url", f"s3://{BUCKET}/kv", "--kv-store-endpoint", store.url)
    options += ("--kv-store-region", "us-east-1", "--kv-store-credentials", str(credentials))
    with (
        EmbeddedRedis(folder / "redis") as redis,
        running_cluster(redis, folder, *options, **sizes) as cluster,
    ):
        yield cluster, redis


def ask(cluster: LocalCluster, prompt: list[int], max_tokens: int) -> tuple[dict[str, Any], str]:
    """Returns the answer, and the worker that decoded it."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(
        f"{cluster.url}/v1/completions",
        json={**body, "return_token_ids": True},
        headers={PLACEMENT: "1"},
        timeout=240,
    )
    assert answer.status_code == 200, answer.text
    worker = answer.headers[PLACEMENT].split("decode=")[1].split()[0]
    return answer.json(), worker


def check_loaded(answer: dict[str, Any], expected: list[int], prompt: list[int]) -> None:
    """Its tokens are right, and its prompt came from the store, but for a part of a block and what
    was computed while the rest was loaded."""
    assert answer["choices"][0]["token_ids"] == expected
    details = answer["usage"]["prompt_tokens_details"]
    by_tier = details["cached_tokens_by_tier"]
    assert sum(by_tier.values()) == details["cached_tokens"] == by_tier["store"], by_tier
    assert by_tier["store"] >= len(prompt) // 2


def test_new_workers_load_what_those_before_them_wrote(
    store: ObjectStoreServer, tmp_path: Path
) -> None:
    """All workers and Redis end. A chat that goes on then is loaded by a worker that asks the
    store alone."""
    (prompt,), (expected,) = golden(6)
    with cluster_with(store, tmp_path) as (cluster, redis):
        first, _ = ask(cluster, prompt, 16)
        assert first["choices"][0]["token_ids"] == expected[:16]
        wait_until_written(store, prompt)
        end_all(cluster)
        redis.restart()
        cluster.start_worker("decode-1", "decode")
        cluster.wait_ready()
        again, _ = ask(cluster, [*prompt, *expected[:16]], 8)
        check_loaded(again, expected[16:24], prompt)
        cluster.wait_idle()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
def test_a_worker_loads_what_lost_ones_wrote(
    store: ObjectStoreServer, tmp_path: Path, prefill: int, decode: int
) -> None:
    """The others go on: a second decode worker, or new ones that find the router and Redis."""
    (prompt,), (expected,) = golden(7)
    with cluster_with(store, tmp_path, prefill=prefill, decode=decode) as (cluster, redis):
        first, chosen = ask(cluster, prompt, 16)
        assert first["choices"][0]["token_ids"] == expected[:16]
        wait_until_written(store, prompt)
        for worker_id in list(cluster.workers):
            if worker_id == chosen or worker_id.startswith("prefill"):
                cluster.workers.pop(worker_id).kill()
        if not cluster.workers:
            cluster.start_worker("decode-9", "decode")
            cluster.wait_ready()
        (other,) = cluster.workers
        again, returned = ask(cluster, prompt, 16)
        assert returned == other
        check_loaded(again, expected[:16], prompt)
        cluster.wait_idle()
        end_all(cluster)
        redis.restart()
        for number in range(prefill):
            cluster.start_worker(f"prefill-{number}", "prefill")
        for number in range(decode):
            cluster.start_worker(f"decode-{number}", "decode")
        cluster.wait_ready()
        after, _ = ask(cluster, [*prompt, *expected[:16]], 8)
        check_loaded(after, expected[16:24], prompt)
        cluster.wait_idle()


def wait_until_written(store: ObjectStoreServer, prompt: list[int]) -> None:
    num_blocks = len(prompt) // 16
    wait_for(lambda: len(store.blocks()) >= num_blocks, deadline_s=DEADLINE_S, what="writes")


def end_all(cluster: LocalCluster) -> None:
    """Kills all workers; the router stays."""
    while cluster.workers:
        cluster.workers.popitem()[1].kill()

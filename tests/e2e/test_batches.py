"""Batches on a real cluster: exact answers, and each line once, whatever is killed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tests.e2e.conftest import running_cluster
from tests.harness.client import GOLDEN
from tests.harness.cluster import LocalCluster, wait_for

DEADLINE_S = 240.0
COMPLETIONS = "/v1/completions"
MAX_TOKENS = 8


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """A cluster with a Redis of its own, whose router keeps files."""
    with (
        EmbeddedRedis(tmp_path / "redis") as redis,
        running_cluster(redis, tmp_path) as started,
    ):
        assert started.router is not None
        started.router.kill()
        started.router.wait()
        started.router_options = [
            *started.router_options,
            *("--files-url", str(tmp_path / "files")),
        ]
        restart_router(started)
        yield started


def restart_router(cluster: LocalCluster) -> None:
    """Starts the router at the ports that it had."""
    admin = ("--admin-port", str(cluster.admin_port))
    cluster.router = cluster.spawn_router(cluster.http_port, cluster.grpc_port, *admin)

    def is_ready() -> bool:
        try:
            return httpx.get(f"{cluster.url}/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    wait_for(is_ready, deadline_s=DEADLINE_S, what="the router", interval_s=0.1)


def body_of(number: int) -> dict[str, Any]:
    """A prompt of its own for each line."""
    prompt = [*GOLDEN[number % len(GOLDEN)]["prompt_token_ids"][:40], 100 + number]
    return {
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def start(client: openai.OpenAI, num_lines: int, folder: Path) -> Any:
    path = folder / "lines.jsonl"
    with path.open("w") as file:
        for n in range(num_lines):
            line = {"custom_id": f"line-{n}", "method": "POST", "url": COMPLETIONS}
            file.write(json.dumps({**line, "body": body_of(n)}) + "\n")
    uploaded = client.files.create(file=path, purpose="batch")
    return client.batches.create(
        input_file_id=uploaded.id, endpoint=COMPLETIONS, completion_window="24h"
    )


def wait_until(client: openai.OpenAI, batch_id: str, num_done: int) -> Any:
    """Returns the batch when it has ended or when so many lines have results. The router may be
    away meanwhile."""

    def look() -> Any:
        try:
            batch = client.batches.retrieve(batch_id)
        except openai.APIError:
            return None
        is_open = batch.status in ("validating", "in_progress", "finalizing")
        return None if is_open and batch.request_counts.completed < num_done else batch

    return wait_for(look, deadline_s=DEADLINE_S, what=f"{num_done} lines", interval_s=0.2)


def check(client: openai.OpenAI, batch: Any, num_lines: int) -> dict[str, list[int]]:
    """Returns custom_id -> the tokens of the answer."""
    counts = batch.request_counts
    assert (batch.status, counts.completed, counts.failed) == ("completed", num_lines, 0)
    answers = [json.loads(each) for each in client.files.content(batch.output_file_id).iter_lines()]
    ids = [answer["custom_id"] for answer in answers]
    assert sorted(ids) == sorted(f"line-{n}" for n in range(num_lines))
    return {a["custom_id"]: a["response"]["body"]["choices"][0]["token_ids"] for a in answers}


def expected(cluster: LocalCluster, number: int) -> list[int]:
    answer = httpx.post(f"{cluster.url}{COMPLETIONS}", json=body_of(number), timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def test_a_batch_answers_as_requests_do(cluster: LocalCluster, tmp_path: Path) -> None:
    num_lines = 12
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
        batch = start(client, num_lines, tmp_path)
        batch = wait_until(client, batch.id, num_lines + 1)
        found = check(client, batch, num_lines)
        for n in (0, num_lines - 1):
            assert found[f"line-{n}"] == expected(cluster, n)
    cluster.wait_idle()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_each_line_once_whatever_is_killed(cluster: LocalCluster, tmp_path: Path) -> None:
    num_lines = 1000
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        batch = start(client, num_lines, tmp_path)

        def kill_router() -> None:
            assert cluster.router is not None
            cluster.router.kill()
            cluster.router.wait()
            restart_router(cluster)

        def kill_worker(worker_id: str) -> None:
            worker = cluster.workers[worker_id]
            worker.kill()
            cluster.start_worker(worker_id, worker.role)

        def kill_redis() -> None:
            cluster.redis.kill()
            time.sleep(2)
            cluster.redis.restart()

        kills = [
            kill_router,
            lambda: kill_worker("decode-0"),
            kill_redis,
            lambda: kill_worker("prefill-0"),
            kill_router,
        ]
        for n, kill in enumerate(kills, start=1):
            before = wait_until(client, batch.id, n * num_lines // (len(kills) + 1))
            assert before.status == "in_progress"
            kill()
        found = check(client, wait_until(client, batch.id, num_lines + 1), num_lines)
        for number in range(0, num_lines, 200):
            assert found[f"line-{number}"] == expected(cluster, number)
    cluster.wait_ready()
    cluster.wait_idle(60)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_another_router_takes_over(cluster: LocalCluster, tmp_path: Path) -> None:
    num_lines = 100
    with (
        cluster.another_router() as url,
        openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none") as first,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as second,
    ):
        batch = start(first, num_lines, tmp_path)
        wait_until(second, batch.id, num_lines // 3)
        assert cluster.router is not None
        cluster.router.kill()
        check(second, wait_until(second, batch.id, num_lines + 1), num_lines)

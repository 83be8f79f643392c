"""A worker pulls blocks that only another worker's tier has; that worker loads them first."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.router.placement.hint import HINT_HEADER, PlacementHint, sign
from tests.e2e.conftest import StartCluster
from tests.harness.client import golden, metric
from tests.harness.cluster import LocalCluster, wait_for
from tests.harness.slow_tier import HOLD_VARIABLE

HAS, ASKED = "decode-0", "decode-1"
NUM_BLOCKS = 28  # of a pool; the prompt and its answer take 13
HOST = ("--num-blocks", str(NUM_BLOCKS), "--kv-host-memory", str(1 << 28), "--prefill-at", "local")


def ask(url: str, prompt: list[int], max_tokens: int, **headers: str) -> dict[str, Any]:
    answer = httpx.post(
        f"{url}/v1/completions",
        json={
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        },
        headers=headers,
        timeout=240,
    )
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def fill_tier(cluster: LocalCluster) -> tuple[list[int], list[int]]:
    """Has the only worker compute a prompt, whose blocks then leave its pool. Returns the prompt of
    the next turn and its answer."""
    (prompt,), (expected,) = golden(5)
    first = ask(cluster.url, prompt, 32, **{"x-session-id": "chat"})
    assert first["choices"][0]["token_ids"] == expected[:32]
    wait_for(
        lambda: metric(cluster, HAS, "tandem_kv_tier_blocks_written_total") >= len(prompt) // 16,
        deadline_s=120,
        what="a copy of the chat's blocks",
    )
    rng = random.Random(7)
    for _ in range(3):
        ask(cluster.url, [rng.randrange(100, 40_000) for _ in range(6 * NUM_BLOCKS)], 1)
    return [*prompt, *expected[:32]], expected[32:40]


@contextmanager
def another_worker(cluster: LocalCluster, *options: str) -> Iterator[str]:
    """Starts a second worker. Yields the URL of a router that sends requests to it alone."""
    cluster.start_worker(ASKED, "decode", *options)
    cluster.wait_ready()
    with cluster.another_router("--front-of", ASKED) as url:
        wait_for(
            lambda: HAS in cluster.records()[ASKED]["transports"],
            deadline_s=60,
            what="a connection of the two workers",
        )
        yield url


def ask_another(cluster: LocalCluster, url: str, prompt: list[int]) -> dict[str, Any]:
    """Returns the second worker's answer."""
    request_id = uuid.uuid4().hex
    hint = sign(PlacementHint(request_id, time.time(), ASKED), cluster.token)
    return ask(url, prompt, 8, **{"x-request-id": request_id, HINT_HEADER: hint})


def loads(cluster: LocalCluster, result: str) -> float:
    return metric(cluster, HAS, "tandem_kv_peer_loads_total", result=result)


@pytest.mark.parametrize("transport", ["nixl", pytest.param("grpc", marks=pytest.mark.slow)])
def test_another_worker_pulls_what_left_the_pool(
    start_cluster: StartCluster, transport: str
) -> None:
    with start_cluster("--transport", transport, *HOST, prefill=0, decode=1) as cluster:
        prompt, expected = fill_tier(cluster)
        with another_worker(cluster) as url:
            again = ask_another(cluster, url, prompt)
            assert again["choices"][0]["token_ids"] == expected
            details = again["usage"]["prompt_tokens_details"]
            assert details["cached_tokens_by_tier"]["peer"] >= 176
            assert loads(cluster, "loaded") == 1
            name = "tandem_prefix_blocks_pulled_total"
            assert metric(cluster, ASKED, name, transport=transport) >= 11
            assert metric(cluster, HAS, "tandem_kv_peer_load_blocks_total") > 0
            cluster.wait_idle()


def is_loading(cluster: LocalCluster, hold: Path) -> bool:
    return hold.with_name(f"{hold.name}.read").exists()


def is_loaded(cluster: LocalCluster, hold: Path) -> bool:
    return loads(cluster, "loaded") == 1


@pytest.mark.slow
@pytest.mark.parametrize("is_time", [is_loading, is_loaded])
@pytest.mark.parametrize("transport", ["nixl", "grpc"])
def test_a_holder_that_is_killed_during_its_load_or_the_pull_changes_no_token(
    start_cluster: StartCluster,
    tmp_path: Path,
    transport: str,
    is_time: Callable[[LocalCluster, Path], bool],
) -> None:
    hold = tmp_path / "hold"
    with start_cluster("--transport", transport, *HOST, prefill=0, decode=0) as cluster:
        cluster.start_worker(
            HAS,
            "decode",
            environment={HOLD_VARIABLE: str(hold)},
            module=("tests.harness.slow_tier", "worker"),
        )
        cluster.wait_ready()
        prompt, expected = fill_tier(cluster)
        # A pull is still under way when the test has seen the end of the load.
        delay = ("--transfer-delay", "3") if is_time is is_loaded else ()
        if is_time is is_loading:
            hold.touch()
        with another_worker(cluster, *delay) as url, ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask_another, cluster, url, prompt)
            wait_for(lambda: is_time(cluster, hold), deadline_s=60, what="the load")
            cluster.workers.pop(HAS).kill()
            assert answer.result()["choices"][0]["token_ids"] == expected
            log = cluster.workers[ASKED].log.read_text()
            assert f"could not be pulled from {HAS}" in log or "was not pulled in time" in log
            assert metric(cluster, ASKED, "tandem_prefix_blocks_pulled_total") == 0
            cluster.wait_idle(deadline_s=60)

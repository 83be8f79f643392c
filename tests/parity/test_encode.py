"""Prompts whose images an encode worker computes have the tokens of transformers, and no request is
lost when the encode worker is lost, late, or has another checkpoint."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.models.folder import ModelFolder
from tests.harness.client import metric, open_client
from tests.harness.cluster import LocalCluster, wait_for
from tests.vision_models import (
    chat_part,
    make_image,
    make_vision_model,
    reference_prompt,
    reference_tokens,
)

_NUM_TOKENS = 8
_OPTIONS = ("--dtype", "float32", "--block-size", "16", "--num-blocks", "400")
_REMOTE = ("--prefill-at", "remote", "--local-prefill-max-tokens", "0")
Made = tuple[ModelFolder, PreTrainedModel]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_vision_model(tmp_path_factory.mktemp("smolvlm"))


@pytest.fixture
def cluster(made: Made, redis_server: EmbeddedRedis, tmp_path: Path) -> Iterator[LocalCluster]:
    found = LocalCluster(redis_server, tmp_path, str(made[0].path), _OPTIONS)
    found.router_options = (*found.router_options, "--ttft-limit", "0")
    found.start_router()
    yield found
    found.close()


def _chat(*seeds: int) -> tuple[list[dict[str, Any]], list[Any]]:
    images = [make_image(seed, 90, 60) for seed in seeds]
    parts = [chat_part(image) for image in images]
    content = [*parts, {"type": "text", "text": "What is it?"}]
    return [{"role": "user", "content": content}], images


async def _ask(cluster: LocalCluster, made: Made, *seeds: int) -> None:
    """Sends a chat with these images, and compares its answer with transformers."""
    messages, images = _chat(*seeds)
    body = {"messages": messages, "max_tokens": _NUM_TOKENS, "temperature": 0}
    more = {"ignore_eos": True, "return_token_ids": True}
    async with open_client(cluster) as client:
        reply = await client.post("/v1/chat/completions", json=body | more)
    assert reply.status_code == 200, reply.text
    prompt, pixels = reference_prompt(made[0], messages, images)
    answer = reply.json()
    assert answer["prompt_token_ids"] == prompt
    expected = reference_tokens(made[1], prompt, pixels, _NUM_TOKENS)
    assert answer["choices"][0]["token_ids"] == expected


def _outcomes(cluster: LocalCluster, worker_id: str) -> dict[str, float]:
    """How often requests for images of a worker had each outcome."""
    names = ("encoded", "busy", "late", "lost", "wrong")
    counts = {
        name: metric(cluster, worker_id, "tandem_encode_requests_total", outcome=name)
        for name in names
    }
    return {name: count for name, count in counts.items() if count}


def _wait_ready(cluster: LocalCluster) -> None:
    """Waits until all workers are ready, and those with KV know the encode worker."""
    cluster.wait_ready()
    for worker in cluster.workers.values():
        if worker.role != "encode":
            wait_for(
                lambda name=worker.worker_id: metric(cluster, name, "tandem_encode_workers") == 1,
                deadline_s=60,
                what=f"the encode worker at {worker.worker_id}",
            )


def _num_encoded(cluster: LocalCluster) -> float:
    return metric(cluster, "encode-0", "tandem_image_seconds_count")


def test_one_worker_and_an_encode_worker(cluster: LocalCluster, made: Made) -> None:
    cluster.start_worker("encode-0", "encode")
    cluster.start_worker("decode-0", "decode")
    _wait_ready(cluster)
    asyncio.run(_ask(cluster, made, 1, 2))
    assert _outcomes(cluster, "decode-0") == {"encoded": 2}
    assert _num_encoded(cluster) == 2
    asyncio.run(_ask(cluster, made, 1, 2))
    assert _outcomes(cluster, "decode-0") == {"encoded": 2}, "the images are cached"
    cluster.workers["encode-0"].kill()
    asyncio.run(_ask(cluster, made, 3))
    assert _outcomes(cluster, "decode-0").get("encoded") == 2
    state = cluster.workers["decode-0"].state()
    assert state.integrity_ok, state.integrity_message
    assert not state.load.blocks_used


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["nixl", "grpc"])
def test_three_pools(cluster: LocalCluster, made: Made, transport: str) -> None:
    cluster.options = (*cluster.options, *_REMOTE, "--transport", transport)
    cluster.start_worker("encode-0", "encode")
    cluster.start_worker("prefill-0", "prefill")
    cluster.start_worker("decode-0", "decode")
    _wait_ready(cluster)
    asyncio.run(_ask(cluster, made, 1))
    asyncio.run(_ask(cluster, made, 2, 1))
    assert _outcomes(cluster, "prefill-0") == {"encoded": 3 - 1}, "one image is kept"
    assert not _outcomes(cluster, "decode-0")
    assert metric(cluster, "decode-0", "tandem_kv_blocks_pulled_total", transport=transport)
    # the pools, as operators see them
    records = cluster.records()
    assert records["encode-0"]["role"] == records["encode-0"]["pool"] == "encode"


@pytest.mark.slow
def test_an_encode_worker_that_is_killed_or_hangs_loses_no_request(
    cluster: LocalCluster, made: Made
) -> None:
    cluster.options = (*cluster.options, "--encode-deadline", "2")
    encode = cluster.start_worker("encode-0", "encode")
    cluster.start_worker("decode-0", "decode")
    _wait_ready(cluster)

    async def interrupted(number: int, seed: int) -> None:
        """The encode worker gets `number` after a request has reached it."""
        os.kill(encode.process.pid, signal.SIGSTOP)
        asked = asyncio.create_task(_ask(cluster, made, seed))
        await asyncio.sleep(0.5)
        os.kill(encode.process.pid, number)
        await asked

    asyncio.run(
        _ask(cluster, made, 9)
    )  # the router and the worker have imported all that they need
    asyncio.run(interrupted(signal.SIGSTOP, 1))  # it stays stopped
    assert _outcomes(cluster, "decode-0") == {"encoded": 1, "late": 1}
    os.kill(encode.process.pid, signal.SIGCONT)
    wait_for(lambda: cluster.is_ready(encode), deadline_s=60, what="the encode worker again")

    seeds = itertools.count(10)

    def is_encoded() -> bool:
        asyncio.run(_ask(cluster, made, next(seeds)))
        return _outcomes(cluster, "decode-0")["encoded"] > 1

    wait_for(is_encoded, deadline_s=60, what="an image that is encoded again", interval_s=0.5)
    asyncio.run(interrupted(signal.SIGKILL, 2))
    assert _outcomes(cluster, "decode-0").get("lost", 0) >= 1


@pytest.mark.slow
def test_an_encode_worker_with_another_checkpoint_is_not_used(
    cluster: LocalCluster, made: Made, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(made[0].path, other)
    (other / "config.json").write_text((other / "config.json").read_text() + "\n")
    cluster.start_worker("decode-0", "decode")
    encode = cluster.start_worker("encode-0", "encode", "--model", str(other))
    cluster.wait_ready()
    log = cluster.workers["decode-0"].log
    refused = "has another checkpoint"
    wait_for(lambda: refused in log.read_text(), deadline_s=60, what="the refusal")
    asyncio.run(_ask(cluster, made, 1))
    assert not _outcomes(cluster, "decode-0")
    assert encode.process.poll() is None
    assert not cluster.records()["encode-0"]["compatible"]


@pytest.mark.slow
def test_a_model_without_images_has_no_encode_worker(
    redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    cluster = LocalCluster(redis_server, tmp_path)
    worker = cluster.start_worker("encode-0", "encode")
    assert worker.process.wait(120) == 2
    assert "--role encode cannot be used: this model takes text only" in worker.log.read_text()
    cluster.close()

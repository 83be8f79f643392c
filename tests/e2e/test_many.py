"""Several completions of one prompt: each is as if it were asked for alone, whichever way.

A tiny random fp32 model over gRPC with two decode workers, and SmolLM2 over NIXL. Migrated ones are
in tests/parity.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedModel

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.models.source import resolve
from tandem.router.request.choices.children import child_seed
from tests.harness.beam_reference import beams_of
from tests.harness.client import (
    EDITED,
    golden,
    metric,
    open_client,
)
from tests.harness.cluster import LocalCluster
from tests.tiny_models import make_tiny_model

VOCABULARY = 2048  # the first of SmolLM2's, whose tokenizer it has
ENDS = list(range(0, VOCABULARY, 20))  # so many that random beams meet some
DRAWN = {"temperature": 0.9, "top_p": 0.95, "seed": 5}
NUM_BLOCKS = 270  # four long completions fit, and eight do not
LONG = 1000  # tokens: a fault comes before they are made


class Tiny:
    """The cluster, and transformers' own model."""

    def __init__(self, cluster: LocalCluster, model: PreTrainedModel) -> None:
        self.cluster = cluster
        self.model = model
        self._num_prompts = 0

    def prompt(self, num_tokens: int) -> list[int]:
        """Returns one that no other shares a block with."""
        self._num_prompts += 1
        return [(37 * i + 1009 * self._num_prompts) % VOCABULARY for i in range(num_tokens)]


@contextmanager
def serve_tiny(
    redis: EmbeddedRedis,
    folder: Path,
    *,
    num_blocks: int,
    prefill: int,
    decode: int,
    vocabulary: int = VOCABULARY,
) -> Iterator[Tiny]:
    """Serves a tiny random model, with pools of so many blocks."""
    path = folder / "model"
    path.mkdir()
    _, model = make_tiny_model(
        "llama", path, vocab_size=vocabulary, eos_token_id=ENDS, max_position_embeddings=2048
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve("smollm2").path / name, path)
    cluster = LocalCluster(redis, folder, model=str(path))
    cluster.options = [
        *("--numerics", "invariant", "--dtype", "float32", "--transport", "grpc"),
        *("--prefill-at", "remote", "--num-blocks", str(num_blocks)),
    ]
    try:
        yield Tiny(cluster.start(prefill=prefill, decode=decode), model)
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def tiny(redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    folder = tmp_path_factory.mktemp("many")
    with serve_tiny(redis_server, folder, num_blocks=NUM_BLOCKS, prefill=1, decode=2) as started:
        yield started


async def ask(client: httpx.AsyncClient, prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "ignore_eos": True, "return_token_ids": True, **fields}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def alone(
    client: httpx.AsyncClient, prompt: list[int], count: int, seed: int, **fields: Any
) -> list[dict[str, Any]]:
    """Returns the choices of requests with n = 1 and the children's seeds."""
    choices = []
    for child in range(count):
        answer = await ask(client, prompt, **{**fields, "seed": child_seed(seed, child)})
        choices += answer["choices"]
    return [{**choice, "index": index} for index, choice in enumerate(choices)]


@pytest.mark.parametrize("num_tokens", [20, 96, 97])  # computed here, and pulled
@pytest.mark.parametrize(
    "fields", [DRAWN, EDITED, {"temperature": 0}], ids=["drawn", "edited", "greedy"]
)
async def test_each_child_is_as_if_asked_for_alone(
    tiny: Tiny, num_tokens: int, fields: dict[str, Any]
) -> None:
    prompt = tiny.prompt(num_tokens)
    asked = {**fields, "max_tokens": 24, "logprobs": 2}
    async with open_client(tiny.cluster) as client:
        together = await ask(client, prompt, n=4, **asked)
        seed = asked.pop("seed", 0)
        assert together["choices"] == await alone(client, prompt, 4, seed, **asked)
    texts = {choice["text"] for choice in together["choices"]}
    assert len(texts) == (1 if fields == {"temperature": 0} else 4)
    tiny.cluster.wait_idle()


def preemptions(cluster: LocalCluster) -> float:
    workers = [worker for worker in cluster.workers if worker.startswith("decode")]
    return sum(metric(cluster, worker, "tandem_preemptions_total") for worker in workers)


async def test_preempted_children_are_as_if_asked_for_alone(tiny: Tiny) -> None:
    prompt = tiny.prompt(90)
    before = preemptions(tiny.cluster)
    asked = {**DRAWN, "max_tokens": 600}
    async with open_client(tiny.cluster) as client:
        together = await ask(client, prompt, n=8, **asked)
        assert preemptions(tiny.cluster) > before
        seed = asked.pop("seed")
        assert together["choices"][:3] == await alone(client, prompt, 3, seed, **asked)
        (last,) = await alone(client, prompt, 1, child_seed(seed, 7), **asked)
        assert together["choices"][7] == {**last, "index": 7}
    tiny.cluster.wait_idle()


@pytest.mark.parametrize("num_tokens", [10, 90])  # computed here, and pulled
async def test_beams_are_the_reference(tiny: Tiny, num_tokens: int) -> None:
    ended = 0
    async with open_client(tiny.cluster) as client:
        for width, length_penalty, ignores in ((1, 1.0, False), (4, 1.0, True), (4, -2.0, False)):
            prompt = tiny.prompt(num_tokens)
            answer = await ask(
                client,
                prompt,
                n=width,
                use_beam_search=True,
                length_penalty=length_penalty,
                ignore_eos=ignores,
                max_tokens=20,
            )
            expected = beams_of(
                tiny.model,
                prompt,
                width=width,
                max_tokens=20,
                length_penalty=length_penalty,
                end_token_ids=ENDS,
                ignore_eos=ignores,
            )
            assert [c["token_ids"] for c in answer["choices"]] == expected
            ended += sum(c["finish_reason"] == "stop" for c in answer["choices"])
            num_made = sum(map(len, expected))
            assert answer["usage"]["completion_tokens"] == num_made
            assert answer["usage"]["prompt_tokens"] == num_tokens
    assert ended
    tiny.cluster.wait_idle()


async def test_four_beams_fit_where_four_copies_take_twice_the_blocks(
    redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    num_prompt_tokens = 20
    max_tokens = 128
    copies = 4 * -(-(num_prompt_tokens + max_tokens) // 16)
    pool = {"num_blocks": copies // 2, "prefill": 0, "decode": 1}
    with serve_tiny(redis_server, tmp_path, **pool) as tiny:
        prompt = tiny.prompt(num_prompt_tokens)
        async with open_client(tiny.cluster) as client:
            asked = {"n": 4, "max_tokens": max_tokens}
            answer = await ask(client, prompt, use_beam_search=True, **asked)
            assert preemptions(tiny.cluster) == 0
            await ask(client, prompt, **asked, **DRAWN)
            assert preemptions(tiny.cluster) > 0, "completions that differ do not fit"
        expected = beams_of(
            tiny.model,
            prompt,
            width=4,
            max_tokens=max_tokens,
            length_penalty=1.0,
            end_token_ids=ENDS,
            ignore_eos=True,
        )
        assert [choice["token_ids"] for choice in answer["choices"]] == expected
        tiny.cluster.wait_idle()


async def test_the_kv_of_a_prompt_crosses_once(cluster: LocalCluster) -> None:
    def work() -> tuple[float, float]:
        pulled = metric(cluster, "decode-0", "tandem_kv_bytes_pulled_total", transport="nixl")
        return pulled, metric(cluster, "decode-0", "tandem_prefill_tokens_total")

    prompt = golden(6)[0][0]
    assert len(prompt) % 16 > 1, "its last block is partly filled"
    pulled, computed = [], []
    asked = {**DRAWN, "max_tokens": 32}
    async with open_client(cluster) as client:
        for n in (1, 4):
            fresh = [100 + n, *prompt[1:]]  # nothing of it is cached
            before = work()
            answer = await ask(client, fresh, n=n, **asked)
            after = work()
            pulled.append(after[0] - before[0])
            computed.append(after[1] - before[1])
            record = (await client.get(f"/v1/requests/{answer['id']}")).json()
            assert record["bytes_pulled"] == pulled[-1]
        seed = int(asked.pop("seed"))
        assert answer["choices"] == await alone(client, fresh, 4, seed, **asked)
    print(f"bytes pulled for n = 1: {pulled[0]:g}, for n = 4: {pulled[1]:g}")
    assert 0 < pulled[1] <= 1.02 * pulled[0]
    assert computed == [0, 3], "a fork computes one token"
    cluster.wait_idle()


async def test_a_client_that_leaves_frees_all_children(tiny: Tiny) -> None:
    async with open_client(tiny.cluster) as client:
        for fields in ({}, {"use_beam_search": True}):
            body = {"prompt": tiny.prompt(50), "n": 4, "max_tokens": LONG, "ignore_eos": True}
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/completions", json={**body, **fields}, timeout=0.5)
            await asyncio.to_thread(tiny.cluster.wait_idle)

"""Whole clusters whose workers compute on a CUDA device, all on the same one: tokens as those of
transformers whichever way the KV came, through the device's memory and through the host's."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tests.e2e.conftest import StartCluster
from tests.harness.client import complete_all, metric
from tests.harness.cluster import LocalCluster
from tests.parity.ways import Way, all_disturbed, start_ways
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.gpu

NUM_TOKENS = 24
OPTIONS = ("--device", "cuda", "--kernels", "triton", "--numerics", "fast", "--dtype", "float32")
OPTIONS += ("--kv-dtype", "float32", "--max-num-seqs", "8", "--max-model-len", "512")
WAYS = ("aggregated", "cuda_ipc", "nixl", "grpc")
PROMPTS = [
    [random.Random(length).randrange(203) for _ in range(length)]
    for length in (3, 40, 97, 130, 180, 255)
]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[int]]]:
    """The folder of a tiny random model, and what transformers answers to the prompts on a CPU."""
    folder = tmp_path_factory.mktemp(request.param)
    _, reference = make_tiny_model(request.param, folder)
    answers = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        with torch.no_grad():
            made = reference.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                min_new_tokens=NUM_TOKENS,
                max_new_tokens=NUM_TOKENS,
            )
        answers.append(made[0, len(prompt) :].tolist())
    return folder, answers


@pytest.fixture(scope="module")
def ways(
    model: tuple[Path, list[list[int]]],
    redis_server: EmbeddedRedis,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Mapping[str, Way]]:
    folder = tmp_path_factory.mktemp("clusters")
    with start_ways(redis_server, folder, str(model[0]), *OPTIONS, names=WAYS) as all_ways:
        yield all_ways


async def test_tokens_are_those_of_transformers_whichever_way_the_kv_came(
    ways: Mapping[str, Way], model: tuple[Path, list[list[int]]]
) -> None:
    fields = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    asked = [
        ("/v1/completions", {"prompt": prompt, "max_tokens": NUM_TOKENS, **fields})
        for prompt in PROMPTS
    ]
    with all_disturbed(ways):
        answered = await asyncio.gather(*(way.send_all(asked) for way in ways.values()))
    for name, answers in zip(ways, answered, strict=True):
        made = [answer["choices"][0]["token_ids"] for answer in answers]
        assert made == model[1], name


async def test_blocks_that_left_the_device_come_back_from_the_host(
    start_cluster: StartCluster, model: tuple[Path, list[list[int]]]
) -> None:
    options = (*OPTIONS, "--num-blocks", "34", "--kv-host-memory", str(64 << 20))
    with start_cluster(*options, model=str(model[0]), prefill=0) as cluster:
        for _ in range(5):  # copies are kept of what is likely to come again
            for prompt, expected in zip(PROMPTS, model[1], strict=True):
                assert await ask(cluster, prompt) == expected
        assert loaded(cluster) > 0
        cluster.wait_idle()


@pytest.mark.parametrize("transport", ["cuda_ipc", "nixl", "grpc"])
@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
async def test_ranks_with_a_pool_each_exchange_blocks_with_one_rank(
    prefill: int,
    decode: int,
    transport: str,
    model: tuple[Path, list[list[int]]],
    redis_server: EmbeddedRedis,
    tmp_path: Path,
) -> None:
    """The ranks share the GPU."""
    cluster = LocalCluster(redis_server, tmp_path, str(model[0]))
    cluster.options = (*cluster.options, *OPTIONS, "--transport", transport)
    cluster.options += ("--local-prefill-max-tokens", "0", "--verify-blocks", "all")
    try:
        cluster.start_router()
        for role, num_ranks in (("prefill", prefill), ("decode", decode)):
            ranks = ("--tensor-parallel", str(num_ranks), "--ranks-share-gpu")
            cluster.start_worker(f"{role}-0", role, *(ranks if num_ranks > 1 else ()))
        cluster.wait_ready()
        for prompt, expected in zip(PROMPTS, model[1], strict=True):
            assert await ask(cluster, prompt) == expected
        assert metric(cluster, "decode-0", "tandem_kv_blocks_pulled_total", transport=transport)
        assert metric(cluster, "decode-0", "tandem_block_mismatches_total") == 0
        cluster.wait_idle()
    finally:
        cluster.close()


async def ask(cluster: LocalCluster, prompt: list[int]) -> list[int]:
    (answer,) = await complete_all(cluster, [prompt], max_tokens=NUM_TOKENS)
    return answer.token_ids


def loaded(cluster: LocalCluster) -> float:
    return metric(cluster, "decode-0", "tandem_kv_tier_blocks_loaded_total", tier="host")

"""Token-exact in fp32 whichever way a prompt's KV comes to the decode worker (issue's point 2)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tests.e2e.conftest import StartCluster, running_cluster
from tests.harness.client import (
    EDITED,
    GOLDEN,
    complete,
    complete_all,
    complete_choice,
    golden,
    metric,
    open_client,
)
from tests.harness.cluster import LocalCluster

PULLING = ("--transport", "nixl", "--verify-blocks", "all", "--local-prefill-max-tokens", "0")
ALL = tuple(range(8))
STRINGS = {"type": "array", "items": {"type": "string"}, "minItems": 2}
WORDS = "[a-z]{3,9}( [a-z]{1,9}){3}"
HITTERS = {"policy": "heavy_hitters", "tokens": 224}


def some_or_all(*some: int) -> pytest.MarkDecorator:
    """A few reference prompts in every run, all eight in the long form (pytest -m slow)."""
    everything = pytest.param(ALL, id="all", marks=pytest.mark.slow)
    return pytest.mark.parametrize("numbers", [pytest.param(some, id="some"), everything])


_sampled: list[list[int]] = []
_edited: list[list[dict[str, Any]]] = []


def blocks_moved(cluster: LocalCluster, transport: str, worker_id: str = "decode-0") -> float:
    return metric(cluster, worker_id, "tandem_kv_blocks_pulled_total", transport=transport)


async def assert_sampled_alike(cluster: LocalCluster) -> None:
    """The same text for a seed, and the same log probabilities to the last bit, as every other test
    of this module got, whichever way."""
    prompt = golden(5)[0][0]
    async with open_client(cluster) as client:
        asked = [
            {"prompt": prompt, "max_tokens": 64, "temperature": 0.8, "top_p": 0.9, "seed": 7},
            {**EDITED, "prompt": prompt, "max_tokens": 24},
            {"prompt": prompt, "max_tokens": 4, "echo": True, "logprobs": 0},
            {"prompt": prompt, "max_tokens": 0, "echo": True, "prompt_logprobs": 3},
            {**EDITED, "prompt": prompt, "max_tokens": 24, "guided_json": STRINGS},
            {"prompt": prompt, "max_tokens": 24, "guided_regex": WORDS, "logprobs": 1},
            {"prompt": prompt, "max_tokens": 24, "kv_budget": {"tokens": 60}, "logprobs": 1},
            {"prompt": [*prompt, *prompt], "max_tokens": 70, "kv_budget": HITTERS, "logprobs": 1},
        ]
        choices = []
        for start in range(0, len(asked), 3):  # more at once look like an overload where it is slow
            some = [complete_choice(client, **fields) for fields in asked[start : start + 3]]
            choices += await asyncio.gather(*some)
    sampled, *edited = choices
    _sampled.append(sampled["token_ids"])
    assert _sampled[-1] == _sampled[0]
    _edited.append(edited)
    assert edited == _edited[0]
    # Those of the prompt and the greedy tokens are transformers'.
    logprobs = edited[1]["logprobs"]["token_logprobs"]
    assert logprobs[0] is None
    assert len(logprobs) == len(prompt) + 4
    assert logprobs[1:] == pytest.approx(GOLDEN[5]["logprobs"][: len(prompt) + 3], abs=1e-4)
    assert edited[2]["token_ids"] == []


@some_or_all(0, 1, 2, 3, 4, 5)
async def test_decode_worker_alone(start_cluster: StartCluster, numbers: tuple[int, ...]) -> None:
    prompts, expected = golden(*numbers)
    with start_cluster(prefill=0) as cluster:
        answers = await complete_all(cluster, prompts)
        assert [a.token_ids for a in answers] == expected
        computed = metric(cluster, "decode-0", "tandem_prefill_tokens_total")
        assert computed == sum(map(len, prompts)) - sum(a.cached_tokens for a in answers)
        await assert_sampled_alike(cluster)
        cluster.wait_idle()


@pytest.fixture(scope="module")
def pulling(
    redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    """A cluster whose decode worker pulls every prompt over NIXL, for the next two tests."""
    with running_cluster(redis_server, tmp_path_factory.mktemp("pulling"), *PULLING) as started:
        yield started


@some_or_all(0, 1, 2, 3, 4, 5, 6)
async def test_disaggregated(pulling: LocalCluster, numbers: tuple[int, ...]) -> None:
    await check_disaggregated(pulling, "nixl", numbers)


@pytest.mark.slow
async def test_disaggregated_over_grpc(start_cluster: StartCluster) -> None:
    # The short form of it: tests/chaos and tests/parity compare tokens over gRPC in each run.
    with start_cluster(*PULLING, "--transport", "grpc") as cluster:
        await check_disaggregated(cluster, "grpc", ALL)


async def check_disaggregated(
    cluster: LocalCluster, transport: str, numbers: tuple[int, ...]
) -> None:
    prompts, expected = golden(*numbers)
    answers = await complete_all(cluster, prompts)
    assert [a.token_ids for a in answers] == expected
    assert metric(cluster, "decode-0", "tandem_block_mismatches_total") == 0
    needed = sum(-(-len(p) // 16) for p in prompts)
    cached = sum(a.cached_tokens for a in answers)
    assert blocks_moved(cluster, transport) >= needed - cached // 16 > 0
    await assert_sampled_alike(cluster)
    cluster.wait_idle()


@some_or_all(5)
async def test_warm_prefix_on_the_prefill_side_only(
    pulling: LocalCluster, numbers: tuple[int, ...]
) -> None:
    prompts, expected = golden(*numbers)
    first = await complete_all(pulling, prompts)
    (known,) = {"decode-0", "decode-1"} & pulling.workers.keys()
    new = "decode-1" if known == "decode-0" else "decode-0"
    pulling.workers[known].stop()
    pulling.start_worker(new, "decode")
    pulling.wait_ready(new)
    del pulling.workers[known]
    again = await complete_all(pulling, prompts)
    assert [a.token_ids for a in first] == expected
    assert [a.token_ids for a in again] == expected
    assert [a.cached_tokens for a in again] == [(len(p) - 1) // 16 * 16 for p in prompts]
    assert blocks_moved(pulling, "nixl", new) >= -(-len(prompts[-1]) // 16)
    pulling.wait_idle()


@some_or_all(5)
async def test_warm_prefix_on_the_decode_side(
    cluster: LocalCluster, numbers: tuple[int, ...]
) -> None:
    prompts, expected = golden(*numbers)
    first = await complete_all(cluster, prompts)
    before = blocks_moved(cluster, "nixl")
    again = await complete_all(cluster, prompts)
    assert [a.token_ids for a in first] == expected
    assert [a.token_ids for a in again] == expected
    # The answers filled the block in which each prompt ends: all but its last token is there.
    assert [a.cached_tokens for a in again] == [len(p) - 1 for p in prompts]
    assert blocks_moved(cluster, "nixl") == before
    cluster.wait_idle()


@some_or_all(0, 1, 5)
@pytest.mark.parametrize("block_size", [1, pytest.param(64, marks=pytest.mark.slow)])
async def test_block_sizes(
    start_cluster: StartCluster, block_size: int, numbers: tuple[int, ...]
) -> None:
    prompts, expected = golden(*numbers)
    options = ("--block-size", str(block_size), "--num-blocks", str(6400 // block_size))
    with start_cluster(*options, "--transport", "nixl") as cluster:
        answers = await complete_all(cluster, prompts)
        assert [a.token_ids for a in answers] == expected
        cached = sum(a.cached_tokens for a in answers) // block_size
        needed = sum(-(-len(p) // block_size) for p in prompts if len(p) > 64 + block_size)
        assert blocks_moved(cluster, "nixl") >= needed - cached > 0
        cluster.wait_idle()


async def edited_alone(cluster: LocalCluster, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Each prompt's answer with everything that edits and measures logits, one after another."""
    fields = {**EDITED, "max_tokens": 64, "prompt_logprobs": 1}
    async with open_client(cluster) as client:
        return [await complete_choice(client, prompt=prompt, **fields) for prompt in prompts[:3]]


async def edited_together(cluster: LocalCluster, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """The same, at once."""
    answers = await asyncio.gather(*(edited_alone(cluster, [prompt]) for prompt in prompts[:3]))
    return [choice for choices in answers for choice in choices]


@pytest.mark.slow  # in CI tests/parity has it, on a small model
@some_or_all(0, 1, 2, 3, 5)
async def test_forced_preemption(start_cluster: StartCluster, numbers: tuple[int, ...]) -> None:
    prompts, expected = golden(*numbers)
    # Room for the longest alone, or for all prompts but not for what they make.
    num_blocks = 24 if numbers != ALL else 140
    with start_cluster("--num-blocks", str(num_blocks), "--transport", "nixl") as cluster:
        answers, edited = await asyncio.gather(
            complete_all(cluster, prompts), edited_together(cluster, prompts)
        )
        assert [a.token_ids for a in answers] == expected
        assert metric(cluster, "decode-0", "tandem_preemptions_total") > 0
        assert edited == await edited_alone(cluster, prompts)
        cluster.wait_idle()


@some_or_all(0, 1, 2, 3, 4, 5, 6)
async def test_sixteen_mixed_requests_and_sampling_with_a_seed(
    cluster: LocalCluster, numbers: tuple[int, ...]
) -> None:
    prompts, expected = golden(*numbers)
    async with open_client(cluster) as client:
        sampled = await complete(client, prompts[5], temperature=0.8, top_p=0.9, seed=7)
    many = [prompts[n % len(prompts)] for n in range(16)]
    wanted = [expected[n % len(prompts)] for n in range(16)]
    greedy, again = (
        await complete_all(cluster, many),
        await complete_all(cluster, [prompts[5]] * 4, temperature=0.8, top_p=0.9, seed=7),
    )
    assert [a.token_ids for a in greedy] == wanted
    assert {tuple(a.token_ids) for a in again} == {tuple(sampled.token_ids)}
    assert sampled.token_ids != expected[5]
    cluster.wait_idle()

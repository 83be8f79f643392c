"""Each family produces transformers' tokens and log probabilities on real workers: one that
computes everything, and a pair whose decode worker pulls the prompt's blocks by NIXL. Sparse
attention does so in the other ways, too.

Chunks have odd sizes, and each prompt is sent twice: the second time its KV is cached.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tests.parity.compare import assert_as_transformers
from tests.parity.ways import Answer, ParityRequest, all_disturbed, send_all_ways, start_ways
from tests.tiny_models import FAMILIES, make_tiny_model

_IN_CI = "qwen3-moe"  # has experts, windows in some layers, head norms and biases
_CHUNK = 37  # tokens in a step
_NUM_TOKENS = 24
_MIGRATED_TOKENS = 80  # so many that requests still run when their worker leaves the pool
_PROMPTS = [
    torch.randint(0, 203, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (150, 157, 97, 30)
]
_ONLY_TORCH = ("llama-small-heads", "minimax-m3")
_USUAL = ("aggregated", "nixl")
_CASES = [
    pytest.param(
        family,
        kernels,
        _USUAL,
        marks=[] if (family, kernels) == (_IN_CI, "native") else pytest.mark.slow,
    )
    for family in FAMILIES
    for kernels in ("native", "torch")
    # The native kernels need heads that are multiples of 16, and indexers that choose tokens.
    if kernels != "native" or not family.startswith(_ONLY_TORCH)
] + [
    # A way of its own for a model with indexers, whose keys are a further part of its KV.
    pytest.param(
        family,
        "torch",
        (name,),
        id=f"{family}-{name}",
        marks=[pytest.mark.slow] * ((family, name) != ("glm5", "nixl")),
    )
    for family in ("glm5", "minimax-m3")
    for name in ("nixl", "grpc", "preempted", "migrated")
]


@pytest.mark.parametrize(("family", "kernels", "names"), _CASES)
def test_aggregated_and_pulled_and_warm(
    family: str,
    kernels: str,
    names: tuple[str, ...],
    redis_server: EmbeddedRedis,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    stored, model = make_tiny_model(family, folder)
    num_tokens = _MIGRATED_TOKENS if "migrated" in names else _NUM_TOKENS
    sent = [_make_request(prompt, num_tokens) for prompt in _PROMPTS]
    options = ("--kernels", kernels, "--max-tokens-per-step", str(_CHUNK))
    with start_ways(redis_server, tmp_path, str(folder), *options, names=names) as ways:
        with all_disturbed(ways):
            cold = asyncio.run(send_all_ways(ways, sent))
        warm = asyncio.run(send_all_ways(ways, sent))
    for name in names:
        for one, first, again in zip(sent, cold[name], warm[name], strict=True):
            for answer in (first, again):
                _check(model, one, answer)
            if name == "preempted":
                continue  # the pool is too small to keep all prompts
            assert _num_cached(first) == 0
            num_tokens = len(one[1]["prompt"])
            # A request resumes after a frozen state, at a multiple of 64.
            resumable = (
                (num_tokens - 1) // 64 * 64
                if stored.config.has_states
                else num_tokens // 16 * 16 - 16
            )
            assert _num_cached(again) >= resumable


def _make_request(prompt: list[int], num_tokens: int) -> ParityRequest:
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
    return "/v1/completions", body | {"ignore_eos": True, "return_token_ids": True, "logprobs": 3}


def _check(model: PreTrainedModel, sent: ParityRequest, answer: Answer) -> None:
    """Checks that tokens and log probabilities equal transformers'."""
    assert_as_transformers(model, sent, answer)
    prompt = sent[1]["prompt"]
    made = answer["choices"][0]["token_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + made])).logits[0, len(prompt) - 1 : -1]
    assert len(made) == sent[1]["max_tokens"]
    assert logits.argmax(-1).tolist() == made


def _num_cached(answer: Answer) -> int:
    details = answer["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"]) if details else 0

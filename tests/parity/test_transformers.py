"""Models that the transformers library computes give its own tokens on real workers: one that
computes everything, and a pair whose decode worker pulls the prompt's blocks by NIXL.

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
from tests.harness.cluster import LocalCluster
from tests.parity.compare import assert_as_transformers
from tests.parity.ways import Answer, ParityRequest, all_disturbed, send_all_ways, start_ways
from tests.transformers_models import MODELS, make_model

_IN_CI = "gpt2"
_NUM_TOKENS = 24
_PROMPTS = [
    torch.randint(3, 203, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (150, 97, 30)
]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == _IN_CI else pytest.mark.slow) for name in MODELS],
)
def test_aggregated_and_pulled_by_nixl_and_warm(
    name: str, redis_server: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = ("--model-impl", "transformers")
    monkeypatch.setattr(LocalCluster, "router_options", (*LocalCluster.router_options, *chosen))
    folder = tmp_path / "model"
    folder.mkdir()
    model = make_model(name, folder)
    expected = [_generate(model, prompt) for prompt in _PROMPTS]
    sent = [_request(prompt) for prompt in _PROMPTS]
    options = (*chosen, "--dtype", "float32", "--numerics", "fast", "--max-tokens-per-step", "37")
    ways_tried = ("aggregated", "nixl")
    with start_ways(redis_server, tmp_path, str(folder), *options, names=ways_tried) as ways:
        with all_disturbed(ways):
            cold = asyncio.run(send_all_ways(ways, sent))
        warm = asyncio.run(send_all_ways(ways, sent))
    for way in ways_tried:
        for request, tokens, first, again in zip(sent, expected, cold[way], warm[way], strict=True):
            for answer in (first, again):
                assert answer["choices"][0]["token_ids"] == tokens
                assert_as_transformers(model, request, answer)
            assert _num_cached(again) >= len(request[1]["prompt"]) // 16 * 16 - 16


def _request(prompt: list[int]) -> ParityRequest:
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": _NUM_TOKENS, "temperature": 0}
    return "/v1/completions", body | {"ignore_eos": True, "return_token_ids": True, "logprobs": 3}


def _generate(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    made = model.generate(
        torch.tensor([prompt]), max_new_tokens=_NUM_TOKENS, do_sample=False, eos_token_id=None
    )
    tokens: list[int] = made[0, len(prompt) :].tolist()
    assert len(set(tokens)) > 3, "a model that repeats a token hides wrong attention"
    return tokens


def _num_cached(answer: Answer) -> int:
    details = answer["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"]) if details else 0

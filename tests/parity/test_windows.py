"""Models with windows produce transformers' tokens, however their KV was obtained: with windows in
all layers, or in every second layer of a model with experts and sinks. So does a model that stores
latents.

All layers of Mistral have a window, so they form one KV group; gpt-oss and Gemma 3 also have a
group without one. Gemma 4 and MiMo V2 Flash have two groups, whose heads differ in size or number;
their prompts are also sent for four completions at once. In CI gpt-oss is tested in three of the
ways; tests/chaos tests the others, and compares Gemma 3's tokens after pulls over NIXL and gRPC and
after migrations.

Prompts are several windows long. Each is sent twice: the second time its KV is cached.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tests.parity.models import make_random_model
from tests.parity.ways import WAYS, Answer, ParityRequest, all_disturbed, send_all_ways, start_ways

_NUM_TOKENS = 96
_SMALL_POOL = 18  # four windows of three blocks and one more block each, and two blocks
_PROMPTS = [
    torch.randint(1000, 9000, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (150, 157, 97, 155, 30, 158)
]


def _make_request(prompt: list[int]) -> ParityRequest:
    return "/v1/completions", {
        "prompt": prompt,
        "max_tokens": _NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def _token_ids(answer: Answer) -> list[int]:
    token_ids: list[int] = answer["choices"][0]["token_ids"]
    return token_ids


@pytest.mark.parametrize(
    ("family", "names"),
    [
        pytest.param("gpt_oss", ("aggregated", "nixl", "preempted"), id="gpt_oss-some"),
        *(
            pytest.param(family, WAYS, id=family, marks=pytest.mark.slow)
            for family in ("mistral", "gpt_oss", "gemma3", "deepseek_v3", "gemma4", "mimo_v2")
        ),
    ],
)
def test_each_way(
    family: str, names: tuple[str, ...], redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    model = make_random_model(tmp_path / "model", family)
    sent = [_make_request(prompt) for prompt in _PROMPTS]
    with start_ways(
        redis_server, tmp_path, str(tmp_path / "model"), small_pool=_SMALL_POOL, names=names
    ) as ways:
        with all_disturbed(ways):
            first, again = (asyncio.run(send_all_ways(ways, sent)) for _ in range(2))
        if family in ("gemma4", "mimo_v2"):
            forked = asyncio.run(
                send_all_ways(ways, [(path, body | {"n": 4}) for path, body in sent])
            )
            for name in ways:
                for answer, alone in zip(forked[name], first[name], strict=True):
                    texts = [choice["token_ids"] for choice in answer["choices"]]
                    assert texts == [_token_ids(alone)] * 4, name
        expected = list(map(_token_ids, first["aggregated"]))
        for prompt, made in zip(_PROMPTS, expected, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + made])).logits[0, len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist() == made
        for name in ways:
            for answers in (first[name], again[name]):
                assert list(map(_token_ids, answers)) == expected, name
            cached = again[name][0]["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert name == "preempted" or cached in (144, 149), name

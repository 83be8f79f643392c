"""Quantized KV produces the same tokens, however it was obtained: scales are transferred with the
data.

The expected tokens are those of one engine in this process. Each prompt is sent twice, with two
completions: the second time its KV is cached, and the second completion is a fork of the first. In
CI latents are tested in two of the ways; tests/chaos also tests the int8 KV of heads, over gRPC and
migrated.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.common.config.engine import KvDtype
from tests.parity.models import engine_tokens, make_random_model
from tests.parity.ways import WAYS, Answer, ParityRequest, all_disturbed, send_all_ways, start_ways

_NUM_TOKENS = 80
_PROMPTS = [
    torch.randint(1000, 9000, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (150, 157, 97, 30)
]


def _make_request(prompt: list[int]) -> ParityRequest:
    return "/v1/completions", {
        "prompt": prompt,
        "n": 2,
        "max_tokens": _NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def _token_ids(answer: Answer) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


@pytest.mark.parametrize(
    ("family", "kv_dtype", "names"),
    [
        pytest.param("deepseek_v3", "int8", ("nixl", "preempted"), id="deepseek_v3-int8-some"),
        *(
            pytest.param(family, kv_dtype, WAYS, id=f"{family}-{kv_dtype}", marks=pytest.mark.slow)
            for family, kv_dtype in (
                ("deepseek_v3", "int8"),
                *(("llama", each) for each in ("int8", "fp8_e4m3", "k8v4", "int4")),
            )
        ),
    ],
)
def test_each_way(
    redis_server: EmbeddedRedis,
    tmp_path: Path,
    family: str,
    kv_dtype: KvDtype,
    names: tuple[str, ...],
) -> None:
    (tmp_path / "model").mkdir()
    model = str(tmp_path / "model")
    make_random_model(tmp_path / "model", family)
    made = engine_tokens(model, _PROMPTS, kv_dtype=kv_dtype, max_tokens=_NUM_TOKENS)
    expected = [[tokens] * 2 for tokens in made]
    sent = [_make_request(prompt) for prompt in _PROMPTS]
    more = ("--kv-dtype", kv_dtype)
    with start_ways(redis_server, tmp_path, model, *more, names=names) as ways:
        with all_disturbed(ways):
            for _ in range(2):
                answers = asyncio.run(send_all_ways(ways, sent))
                for name, found in answers.items():
                    assert list(map(_token_ids, found)) == expected, name
        for name, found in answers.items():
            cached = found[0]["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert name == "preempted" or cached in (144, 149), name

"""A model with states produces transformers' tokens, however its states were obtained.

Each prompt is sent twice, and then a second turn: the prompt, the answer and more tokens. The
second time, a request resumes after a frozen state, which its worker has or pulls.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tests.parity.models import make_random_model
from tests.parity.ways import WAYS, Answer, ParityRequest, all_disturbed, send_all_ways, start_ways

_NUM_TOKENS = 80
_SMALL_POOL = 24
_PROMPTS = [
    torch.randint(1000, 9000, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (150, 157, 97, 155, 30, 201)
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


def _num_cached(answer: Answer) -> int:
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


@dataclass(frozen=True)
class Ranks:
    """The ranks of prefill and of decode workers, and further options."""

    degrees: tuple[int, int] = (1, 1)
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        kind = "own-pools" if self.options else "native"
        return f"P{self.degrees[0]}-D{self.degrees[1]}-{kind}"


_ALONE = Ranks()
_OWN_POOLS = ("--kernels", "torch", "--ranks-own-pools", "--numerics", "invariant")


@pytest.mark.parametrize(
    ("family", "names", "ranks"),
    [
        pytest.param("qwen3_next", ("aggregated", "nixl"), _ALONE, id="nixl"),
        *(
            pytest.param(
                "qwen3_next", ("aggregated", name), _ALONE, id=name, marks=pytest.mark.slow
            )
            for name in WAYS
            if name not in ("aggregated", "nixl")
        ),
        pytest.param(
            "falcon_h1", ("aggregated", *WAYS[1:3]), _ALONE, id="falcon_h1", marks=pytest.mark.slow
        ),
        *(
            pytest.param("qwen3_next", names, ranks, id=str(ranks), marks=pytest.mark.slow)
            for names, ranks in (
                (WAYS, Ranks((2, 1))),
                (WAYS, Ranks((1, 2))),
                (WAYS[:3], Ranks((2, 1), _OWN_POOLS)),
                (WAYS[:3], Ranks((1, 2), _OWN_POOLS)),
                (WAYS, Ranks((2, 4), _OWN_POOLS)),
            )
        ),
    ],
)
def test_each_way(
    family: str,
    names: tuple[str, ...],
    ranks: Ranks,
    redis_server: EmbeddedRedis,
    tmp_path: Path,
) -> None:
    (tmp_path / "model").mkdir()
    model = make_random_model(tmp_path / "model", family)
    sent = [_make_request(prompt) for prompt in _PROMPTS]
    with start_ways(
        redis_server,
        tmp_path,
        str(tmp_path / "model"),
        *ranks.options,
        small_pool=_SMALL_POOL,
        names=names,
        ranks=ranks.degrees,
    ) as ways:
        with all_disturbed(ways):
            first = asyncio.run(send_all_ways(ways, sent))
        made = list(map(_token_ids, first["aggregated"]))
        turns = [
            _make_request([*prompt, *answer, *prompt[:20]])
            for prompt, answer in zip(_PROMPTS, made, strict=True)
        ]
        again = asyncio.run(send_all_ways(ways, sent))
        second = asyncio.run(send_all_ways(ways, turns))
    for answers, requests in ((first, sent), (again, sent), (second, turns)):
        expected = list(map(_token_ids, answers["aggregated"]))
        for (_, body), tokens in zip(requests, expected, strict=True):
            prompt = body["prompt"]
            with torch.no_grad():
                logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist() == tokens
        for name in ways:
            assert list(map(_token_ids, answers[name])) == expected, name
    for name in set(ways) - {"preempted"}:
        for prompt, answer in zip(_PROMPTS, again[name], strict=True):
            assert _num_cached(answer) == (len(prompt) - 1) // 64 * 64, name
        for (_, body), answer in zip(turns, second[name], strict=True):
            # The new tokens are computed, and at most 64 more.
            assert _num_cached(answer) >= len(body["prompt"]) - 20 - 64, name

"""A model with states produces transformers' tokens, however its states were obtained.

Each prompt is sent twice, and then a second turn: the prompt, the answer and more tokens. The
second time, a request resumes after a frozen state, which its worker has, pulls or loads
from disk.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tests.harness.cluster import LocalCluster
from tests.parity.models import make_random_model
from tests.parity.ways import (
    WAYS,
    Answer,
    ParityRequest,
    Way,
    all_disturbed,
    send_all_ways,
    start_ways,
)

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


def _greedy(model: Any, prompt: list[int], tokens: list[int]) -> list[int]:
    """Returns the most likely token at each position of an answer."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    most_likely: list[int] = logits.argmax(-1).tolist()
    return most_likely


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
        *(
            pytest.param(
                family, ("aggregated", *WAYS[1:3]), _ALONE, id=family, marks=pytest.mark.slow
            )
            for family in ("falcon_h1", "kimi_linear")
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
            assert _greedy(model, body["prompt"], tokens) == tokens
        for name in ways:
            assert list(map(_token_ids, answers[name])) == expected, name
    for name in set(ways) - {"preempted"}:
        for prompt, answer in zip(_PROMPTS, again[name], strict=True):
            assert _num_cached(answer) == (len(prompt) - 1) // 64 * 64, name
        for (_, body), answer in zip(turns, second[name], strict=True):
            # The new tokens are computed, and at most 64 more.
            assert _num_cached(answer) >= len(body["prompt"]) - 20 - 64, name


@pytest.mark.slow
def test_a_chat_resumes_after_the_system_prompt_of_an_earlier_one(
    redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    """The first chat freezes a state there. With a prefill worker, this is the one that has it."""
    (tmp_path / "model").mkdir()
    model = make_random_model(tmp_path / "model", "qwen3_next")
    names = ("aggregated", "nixl")
    options = {"max_tokens": 20, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    system = {"role": "system", "content": "You answer each question in one word. " * 18}
    with start_ways(
        redis_server, tmp_path, str(tmp_path / "model"), small_pool=_SMALL_POOL, names=names
    ) as ways:
        for word, num_cached in (("tea", 0), ("sun", 128)):
            messages = [system, {"role": "user", "content": f"{word} " * 200}]
            chat = {"messages": messages} | options
            found = asyncio.run(send_all_ways(ways, [("/v1/chat/completions", chat)]))
            for name in names:
                (answer,) = found[name]
                made = _token_ids(answer)
                assert _greedy(model, answer["prompt_token_ids"], made) == made, name
                assert _num_cached(answer) == num_cached, name


@pytest.mark.parametrize(
    "family", ["qwen3_next", pytest.param("falcon_h1", marks=pytest.mark.slow)]
)
def test_from_disk_after_a_restart(
    family: str, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    """The worker loads prompts until it has measured that it computes this small model faster."""
    (tmp_path / "model").mkdir()
    model = make_random_model(tmp_path / "model", family)
    sent = [_make_request(prompt) for prompt in _PROMPTS]
    cluster = LocalCluster(redis_server, tmp_path, str(tmp_path / "model"))
    tier = ("--kv-disk-path", str(tmp_path / "kv"), "--kv-tier-policy", "lru")
    cluster.options = (*cluster.options, *tier, "--prefill-at", "local")
    way = Way("aggregated", cluster)
    try:
        cluster.start(prefill=0, decode=1)
        first = asyncio.run(way.send_all(sent))
        cluster.wait_idle()
        cluster.workers.pop("decode-0").stop()  # it writes the blocks that have no copy yet
        cluster.start_worker("decode-1", "decode")
        cluster.wait_ready()
        again = asyncio.run(way.send_all(sent))
        cluster.wait_idle()
    finally:
        cluster.close()
    for prompt, answer in zip(_PROMPTS, first, strict=True):
        assert _greedy(model, prompt, _token_ids(answer)) == _token_ids(answer)
    assert list(map(_token_ids, again)) == list(map(_token_ids, first))
    details = [answer["usage"]["prompt_tokens_details"] for answer in again]
    num_loaded = [each["cached_tokens_by_tier"]["disk"] for each in details]
    assert max(num_loaded) >= 64
    assert all(num_tokens % 64 == 0 for num_tokens in num_loaded)

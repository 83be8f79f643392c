"""Each family produces transformers' tokens and log probabilities on real workers, however a
worker obtains the KV and states of a request (ways.py).

Chunks have odd sizes. Each prompt is sent twice: the second time its KV is cached. Then come
requests that leave a cached prompt after different numbers of tokens, and a second turn of each
prompt. One request has several answers.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.models.config.model import ModelConfig
from tests.parity.compare import assert_as_transformers
from tests.parity.ways import (
    Answer,
    ParityRequest,
    Restarted,
    all_disturbed,
    send_all_ways,
    start_ways,
    why_refused,
)
from tests.tiny_models import FAMILIES, make_tiny_model

_IN_CI = (
    # has experts, windows in some layers, head norms and biases
    ("qwen3-moe", "native", ("aggregated", "nixl")),
    # has indexers, whose keys are a further part of its KV
    ("glm5", "torch", ("nixl",)),
)
_CHUNK = 37  # tokens in a step
_NUM_TOKENS = 24
_MIGRATED_TOKENS = 80  # so many that requests still run when their worker leaves the pool
_FEW_TOKENS = 8
_NUM_FORKS = 4
_LEFT_AFTER = (16, 33, 64, 80, 128, 144)  # tokens of the first prompt
_SPACING = 64  # states are frozen at multiples of this
_PROMPTS = [
    torch.randint(0, 203, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (150, 157, 97, 30)
]
# The native kernels need heads that are multiples of 16.
_ONLY_TORCH = ("llama-small-heads",)
_OTHER_WAYS = (("grpc", "preempted", "migrated"), ("ranks",), ("disk",))


def _kernels_of(family: str) -> tuple[str, ...]:
    return ("torch",) if family.startswith(_ONLY_TORCH) else ("native", "torch")


_ALL = [
    *((f, kernels, ("aggregated", "nixl")) for f in FAMILIES for kernels in _kernels_of(f)),
    *((f, _kernels_of(f)[0], names) for f in FAMILIES for names in _OTHER_WAYS),
]
_CASES = [
    pytest.param(
        *case,
        id="-".join((*case[:2], *case[2])),
        marks=[pytest.mark.slow, pytest.mark.timeout(1800)] if is_slow else [],
    )
    for cases, is_slow in ((_IN_CI, False), ([each for each in _ALL if each not in _IN_CI], True))
    for case in cases
]


def _small_pool(model: ModelConfig) -> int:
    """A number of blocks that one request needs, and two at a time do not get."""
    if model.shared_kv is None and all(layer.window is not None for layer in model.layers):
        return 7  # of the longest prompt, only the blocks in the window stay
    return 20


@pytest.mark.parametrize(("family", "kernels", "names"), _CASES)
def test_each_way_and_warm(
    family: str,
    kernels: str,
    names: tuple[str, ...],
    redis_server: EmbeddedRedis,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    stored, whole = make_tiny_model(family, folder)
    model = _Remembered(whole)
    for name in names:
        if why := why_refused(name, stored.config):
            pytest.skip(why)
    has_states = stored.config.has_states

    def resumable(num_tokens: int) -> int:
        """Returns how many of so many cached tokens a request reuses at least."""
        return num_tokens // (_SPACING if has_states else 16) * (_SPACING if has_states else 16)

    num_tokens = _MIGRATED_TOKENS if "migrated" in names else _NUM_TOKENS
    sent = [_make_request(prompt, num_tokens) for prompt in _PROMPTS]
    options = ("--kernels", kernels, "--max-tokens-per-step", str(_CHUNK))
    pool = _small_pool(stored.config)
    with start_ways(
        redis_server, tmp_path, str(folder), *options, names=names, small_pool=pool
    ) as ways:

        def send(requests: list[ParityRequest]) -> dict[str, list[Answer]]:
            """Sends requests in all ways, and checks their answers."""
            answers = asyncio.run(send_all_ways(ways, requests))
            for found in answers.values():
                for one, answer in zip(requests, found, strict=True):
                    _check(model, one, answer)
            return answers

        with all_disturbed(ways):
            cold = send(sent)
        for way in ways.values():
            if isinstance(way, Restarted):
                way.restart()
        warm = send(sent)
        send([_make_fork(_PROMPTS[0], num_tokens)])
        # The first request that leaves a prompt at some depth freezes its states there.
        for round_number in range(2):
            leaving = send([_make_leaving(depth, round_number) for depth in _LEFT_AFTER])
        turns = {
            name: [
                _make_request([*prompt, *_tokens_of(answer), *prompt[:20]], _FEW_TOKENS)
                for prompt, answer in zip(_PROMPTS, answers, strict=True)
            ]
            for name, answers in cold.items()
        }
        # Tokens are those of transformers, so the turns are the same in all ways.
        second = send(turns[names[0]])
    for name in names:
        if name == "preempted":
            continue  # the pool is too small to keep all prompts
        for prompt, first, again, next_turn in zip(
            _PROMPTS, cold[name], warm[name], second[name], strict=True
        ):
            assert _num_cached(first) == 0
            assert _num_cached(again) >= resumable(len(prompt) - 1) - 16 * (not has_states)
            # The new tokens are computed, and at most 64 more.
            assert _num_cached(next_turn) >= len(prompt) + num_tokens - _SPACING, name
        for depth, answer in zip(_LEFT_AFTER, leaving[name], strict=True):
            assert _num_cached(answer) >= resumable(depth), (name, depth)


class _Remembered:
    """A model of transformers that computes each sequence once, because all ways have the same."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.dtype = model.dtype
        self._model = model
        self._outputs: dict[tuple[int, ...], Any] = {}

    def __call__(self, inputs: torch.Tensor, **_: Any) -> Any:
        key = tuple(inputs[0].tolist())
        if key not in self._outputs:
            with torch.inference_mode():
                self._outputs[key] = self._model(inputs)
        return self._outputs[key]


def _make_fork(prompt: list[int], num_tokens: int) -> ParityRequest:
    path, body = _make_request(prompt[:-3], num_tokens)
    return path, body | {"n": _NUM_FORKS, "temperature": 2.0, "seed": 5}


def _make_leaving(depth: int, round_number: int) -> ParityRequest:
    """Makes a request that begins as the first prompt, but only up to `depth` tokens."""
    others = [(token + 1 + round_number) % 203 for token in _PROMPTS[0][depth : depth + 20]]
    return _make_request(_PROMPTS[0][:depth] + others, _FEW_TOKENS)


def _make_request(prompt: list[int], num_tokens: int) -> ParityRequest:
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
    return "/v1/completions", body | {"ignore_eos": True, "return_token_ids": True, "logprobs": 3}


def _check(model: _Remembered, sent: ParityRequest, answer: Answer) -> None:
    """Checks that log probabilities and, without a temperature, tokens equal transformers'."""
    assert_as_transformers(model, sent, answer)
    prompt = sent[1]["prompt"]
    answers = [choice["token_ids"] for choice in answer["choices"]]
    assert [len(made) for made in answers] == [sent[1]["max_tokens"]] * sent[1].get("n", 1)
    if sent[1]["temperature"]:
        assert len({tuple(made) for made in answers}) > 1
        return
    for made in answers:
        logits = model(torch.tensor([prompt + made])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == made


def _tokens_of(answer: Answer) -> list[int]:
    token_ids: list[int] = answer["choices"][0]["token_ids"]
    return token_ids


def _num_cached(answer: Answer) -> int:
    details = answer["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"]) if details else 0

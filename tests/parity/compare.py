"""Compares the answers of two ways, and with transformers; shrinks what differs to one request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.parity.ways import Answer, Asked, Way

# A sequence that was computed anew, in other chunks, may differ in a last bit of fp32.
LOGPROB_ABS = 1e-5
REFERENCE_ABS = 1e-4
_KEPT = ("prompt", "messages", "return_token_ids", "max_tokens", "seed")


def difference(found: Answer, expected: Answer) -> str:
    """Returns where two answers differ; empty if nowhere. Names that are drawn anew are left out"""
    for key in ("choices", "prompt_logprobs", "prompt_token_ids"):
        if reason := _difference(found.get(key), expected.get(key), key):
            return reason
    tokens = ("prompt_tokens", "completion_tokens")
    usages = [[answer["usage"][name] for name in tokens] for answer in (found, expected)]
    return "" if usages[0] == usages[1] else f"usage: {usages[0]} and {usages[1]}"


def _difference(found: Any, expected: Any, at: str) -> str:
    if isinstance(expected, dict) and isinstance(found, dict) and found.keys() == expected.keys():
        parts = ((found[k], expected[k], f"{at}.{k}") for k in expected if k != "id")
    elif isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        parts = ((f, e, f"{at}[{i}]") for i, (f, e) in enumerate(zip(found, expected, strict=True)))
    elif isinstance(expected, float) and isinstance(found, float):
        return "" if abs(found - expected) <= LOGPROB_ABS else f"{at}: {found} and {expected}"
    else:
        return "" if found == expected else f"{at}: {found!r:.300} and {expected!r:.300}"
    return next((reason for part in parts if (reason := _difference(*part))), "")


def shrunk(asked: Asked, one: Way, other: Way) -> str:
    """Returns the smallest request, by leaving out fields, whose answers still differ.

    Where it does not differ any more when it is asked alone, the whole request is returned.
    """
    path, body = asked
    if not _differs((path, body), one, other):
        return f"POST {path} (among others only)\n{json.dumps(body)}"
    for name in [name for name in body if name not in _KEPT]:
        smaller = {key: value for key, value in body.items() if key != name}
        if _differs((path, smaller), one, other):
            body = smaller
    return f"POST {path}\n{json.dumps(body)}"


def _differs(asked: Asked, one: Way, other: Way) -> bool:
    try:
        (found,), (expected,) = (asyncio.run(way.ask_all([asked])) for way in (one, other))
    except AssertionError:
        return False
    return bool(difference(found, expected))


def assert_as_transformers(model: PreTrainedModel, asked: Asked, answer: Answer) -> None:
    """Each log probability of the answer is that of transformers, given the same tokens."""
    path, body = asked
    is_chat = path != "/v1/completions"
    prompt = answer["prompt_token_ids"] if is_chat else body["prompt"]
    for choice in answer["choices"]:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + choice["token_ids"]])).logits[0].double()
        expected = torch.log_softmax(logits, -1)
        if (told := choice.get("logprobs")) is not None:
            rows = expected[len(prompt) - 1 :]
            found = (
                [entry["logprob"] for entry in told["content"]]
                if is_chat
                else told["token_logprobs"]
            )
            tokens = choice["token_ids"][: len(found)]
            assert found == pytest.approx(_at(rows, tokens), abs=REFERENCE_ABS)
        for position, token_id, logprob in _of_prompt(answer, choice, prompt):
            assert logprob == pytest.approx(
                float(expected[position - 1, token_id]), abs=REFERENCE_ABS
            )


def _at(rows: torch.Tensor, tokens: list[int]) -> list[float]:
    return [float(row[token_id]) for row, token_id in zip(rows, tokens, strict=False)]


def _of_prompt(
    answer: Answer, choice: dict[str, Any], prompt: list[int]
) -> Iterator[tuple[int, int, float]]:
    """Yields position, token id and log probability of what was told of the prompt's tokens."""
    told = answer.get("prompt_logprobs") or choice.get("prompt_logprobs") or []
    for position, entries in enumerate(told):
        for token_id, entry in (entries or {}).items():
            yield position, int(token_id), entry["logprob"]

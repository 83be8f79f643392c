"""Compares the answers of two ways, and with transformers; reduces differences to one small
request."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Protocol

import torch

from tests.parity.ways import Answer, ParityRequest, Way

# A sequence that is recomputed in other chunks may differ in the last bit of fp32.
LOGPROB_ABS = 1e-5
REFERENCE_ABS = 1e-4
# position in prompt and completion, token id, log probability
TokenLogprob = tuple[int, int, float]
_KEPT = ("prompt", "messages", "return_token_ids", "max_tokens", "seed")


def difference(found: Answer, expected: Answer) -> str:
    """Describes where two answers differ; empty if they are equal. Random ids are ignored."""
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


def shrunk(sent: ParityRequest, one: Way, other: Way) -> str:
    """Leaves out fields of a request while its answers still differ, and returns the smallest one.

    If they do not differ when it is sent alone, the original request is returned.
    """
    path, body = sent
    if not _differs((path, body), one, other):
        return f"POST {path} (among others only)\n{json.dumps(body)}"
    for name in [name for name in body if name not in _KEPT]:
        smaller = {key: value for key, value in body.items() if key != name}
        if _differs((path, smaller), one, other):
            body = smaller
    return f"POST {path}\n{json.dumps(body)}"


def _differs(sent: ParityRequest, one: Way, other: Way) -> bool:
    try:
        (found,), (expected,) = (asyncio.run(way.send_all([sent])) for way in (one, other))
    except AssertionError:
        return False
    return bool(difference(found, expected))


class Reference(Protocol):
    """A model of transformers, or what stands for one."""

    @property
    def dtype(self) -> torch.dtype: ...

    def __call__(
        self, inputs: torch.Tensor, /, *, attention_mask: torch.Tensor | None = None
    ) -> Any: ...


def assert_as_transformers(model: Reference, sent: ParityRequest, answer: Answer) -> None:
    """Checks that each log probability of the answer equals transformers', given the same
    tokens."""
    path, body = sent
    is_chat = path != "/v1/completions"
    prompt = answer["prompt_token_ids"] if is_chat else body["prompt"]
    for choice in answer["choices"]:
        logprob_data = _of_prompt(answer, choice) + _of_completion(choice, len(prompt))
        if not logprob_data:
            continue
        with torch.inference_mode():
            inputs = torch.tensor([prompt + choice["token_ids"]])
            mask = _mask(body, inputs.shape[1], model.dtype)
            logits = model(inputs, attention_mask=mask).logits[0]
            sums = logits.logsumexp(-1)
        positions, token_ids, logprobs = zip(*logprob_data, strict=True)
        before = torch.tensor(positions) - 1
        expected = (logits[before, torch.tensor(token_ids)] - sums[before]).double()
        error, at = (torch.tensor(logprobs, dtype=torch.float64) - expected).abs().max(0)
        assert error <= REFERENCE_ABS, (
            f"position {positions[at]}, token {token_ids[at]}: {logprobs[at]} and {expected[at]}\n"
            f"POST {path}\n{json.dumps(body)}"
        )


def _mask(body: dict[str, Any], num_tokens: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Builds the attention mask of a request's KV budget; None if it has none."""
    if (budget := body.get("kv_budget")) is None:
        return None
    positions = torch.arange(num_tokens)
    before = positions.view(-1, 1) - positions
    num_last = budget["tokens"] - budget["sinks"]
    seen = (before >= 0) & ((positions < budget["sinks"]) | (before < num_last))
    mask = torch.zeros(seen.shape, dtype=dtype)
    return mask.masked_fill(~seen, torch.finfo(dtype).min)[None, None]


def _of_completion(choice: dict[str, Any], num_prompt_tokens: int) -> list[TokenLogprob]:
    logprob_data = choice.get("logprobs")
    if logprob_data is None:
        return []
    content = logprob_data.get("content")  # format of a chat
    logprobs = (
        logprob_data["token_logprobs"] if content is None else [one["logprob"] for one in content]
    )
    return [
        (position, token_id, logprob)
        for position, (token_id, logprob) in enumerate(
            zip(choice["token_ids"], logprobs, strict=True), num_prompt_tokens
        )
    ]


def _of_prompt(answer: Answer, choice: dict[str, Any]) -> list[TokenLogprob]:
    logprob_data = answer.get("prompt_logprobs") or choice.get("prompt_logprobs") or []
    return [
        (position, int(token_id), entry["logprob"])
        for position, entries in enumerate(logprob_data)
        for token_id, entry in (entries or {}).items()
    ]

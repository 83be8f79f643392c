"""The requests of the parity tests, planned as combinations of what a client may send.

`pairwise` covers each pair of values in few rows, `drawn` all combinations. A row's prompt, seed
and values depend only on its number, so a failure can be reproduced.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MANY = ("n 1", "n 2", "n 4", "beam 1", "beam 4")
LOGPROBS = ("none", "logprobs", "prompt_logprobs", "both")
FORMS = ("none", "schema", "regex", "required tool")
EDITS = ("stop", "seed", "penalties", "bias")
KV = ("all", "budget")
DIMENSIONS: Mapping[str, Sequence[str]] = {
    "many": MANY,
    "logprobs": LOGPROBS,
    "form": FORMS,
    "edit": EDITS,
    "kv": KV,
}
# answer length: a request that is to migrate needs more than 32 remaining tokens
MAX_TOKENS = 96
BEAM_TOKENS = 24
_CANDIDATES = 50

_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "ages": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 8},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}
_TOOL = {
    "type": "function",
    "function": {"name": "describe", "description": "A person", "parameters": _SCHEMA},
}
_FORMS: Mapping[str, dict[str, Any]] = {
    "none": {},
    "schema": {"structured_outputs": {"json": _SCHEMA}},
    "regex": {"structured_outputs": {"regex": "[a-z]{3,9}( [a-z]{1,9}){9,12}"}},
    "required tool": {"tools": [_TOOL], "tool_choice": "required"},
}
_EDITS: Mapping[str, dict[str, Any]] = {
    "stop": {"temperature": 0, "stop": ["q", "Z"], "include_stop_str_in_output": True},
    "seed": {"temperature": 1.0, "top_p": 0.95, "top_k": 500},
    "penalties": {
        "temperature": 0.8,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
    },
    "bias": {
        "temperature": 0.9,
        "logit_bias": {"253": 4.0, "260": 3.0, "28": -100},
        "min_tokens": 8,
        "bad_words": ["the"],
    },
}


@dataclass(frozen=True)
class Row:
    """One request: the planned values, and the body with them."""

    number: int
    many: str
    logprobs: str
    form: str
    edit: str
    kv: str

    @property
    def path(self) -> str:
        """The route of the request; prompts are token ids if the route supports them."""
        is_chat = self.form == "required tool"
        return "/v1/chat/completions" if is_chat else "/v1/completions"

    def body(self, vocab_size: int) -> dict[str, Any]:
        rng = random.Random(self.number)
        prompt = [rng.randrange(100, vocab_size) for _ in range(rng.randrange(20, 150))]
        kind, count = self.many.split()
        body: dict[str, Any] = {"n": int(count), "return_token_ids": True}
        is_chat = self.path != "/v1/completions"
        if is_chat:
            words = " ".join(str(token_id) for token_id in prompt[:8])
            body["messages"] = [{"role": "user", "content": f"Describe {words}"}]
        else:
            body["prompt"] = prompt
        if kind == "beam":
            body |= {"use_beam_search": True, "max_tokens": BEAM_TOKENS, "length_penalty": 0.8}
        else:
            body |= {"max_tokens": MAX_TOKENS, "seed": rng.randrange(2**31)}
            body |= _EDITS[self.edit] | _FORMS[self.form]
        if self.kv == "budget":
            body["kv_budget"] = {"policy": "sinks_window", "tokens": 40, "sinks": 5}
        if self.logprobs in ("logprobs", "both"):
            body |= {"logprobs": True, "top_logprobs": 3} if is_chat else {"logprobs": 3}
        if self.logprobs in ("prompt_logprobs", "both"):
            body["prompt_logprobs"] = 2
        return body


def is_allowed(values: Mapping[str, str]) -> bool:
    """Says whether a request may combine these values: a beam search allows no output format, KV
    budget or logit edits."""
    if values["many"].startswith("beam"):
        plain = values["form"] == "none" and values["edit"] == "stop" and values["kv"] == "all"
        return plain and values["logprobs"] == "none"
    return True


def pairwise(seed: int) -> list[Row]:
    """Plans about 20 rows that contain each allowed pair of values at least once, chosen
    greedily."""
    rng = random.Random(seed)
    missing = {
        pair for values in _all_values() for pair in itertools.combinations(values.items(), 2)
    }
    rows: list[Row] = []
    while missing:
        candidates = rng.sample(list(_all_values()), _CANDIDATES)
        best = max(
            candidates,
            key=lambda values: len(missing & set(itertools.combinations(values.items(), 2))),
        )
        found = missing & set(itertools.combinations(best.items(), 2))
        if found:
            missing -= found
            rows.append(Row(1000 * seed + len(rows), **best))
    return rows


def drawn(seed: int, count: int) -> list[Row]:
    """Draws `count` rows in random order, with every allowed combination equally often. Their
    numbers depend on the seed."""
    rng = random.Random(seed)
    values = list(_all_values())
    chosen = list[dict[str, str]]()
    while len(chosen) < count:
        chosen += rng.sample(values, len(values))
    return [Row(1_000_000 * (1 + seed) + i, **each) for i, each in enumerate(chosen[:count])]


def _all_values() -> Iterator[dict[str, str]]:
    for chosen in itertools.product(*DIMENSIONS.values()):
        values = dict(zip(DIMENSIONS, chosen, strict=True))
        if is_allowed(values):
            yield values

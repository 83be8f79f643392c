"""The sampling parameters of a request. The API, the routers and the engines use the same type.

    where           what happens to the parameters
    API body        They have the values of the client and are checked here.
    router, LLM     `resolved` adds a seed, a token limit, end tokens and the ids of bad words.
    worker.proto    The message fields have the same names, except for `_PLACES` of
                    net/rpc/convert.py.
    engine          They are SequenceSpec.sampling, which scheduler/check_spec.py, sequence.py
                    (`finish_reason`), logit_edits.py and executor/sampler.py use.

services/README.md has the steps to add a field.
"""

import math
from typing import Any, Self

import msgspec
from msgspec.structs import asdict, replace

from tandem.common.printable import shorten
from tandem.errors import BadRequest

CHOICES_MAX = 128  # largest number of completions (sequences) that one request body may ask for
BEAMS_MAX = 16
LOGPROBS_MAX = 20
# OpenAI allows 4 stop strings; Anthropic and vLLM have no limit. This one bounds the time that the
# router takes for a token.
STOP_STRINGS_MAX = 256
STOP_CHARACTERS_MAX = 1024
STOP_TOKEN_IDS_MAX = 128
REPETITION_PENALTY_MAX = 100.0
BIAS_MAX = 100.0
BIASES_MAX = 1024
BAD_WORDS_MAX = 128
BAD_WORD_CHARACTERS_MAX = 128
_INT32_MAX = 2**31 - 1
# Below this temperature, dividing logits by it overflows float32. vLLM uses the same bound.
_TEMPERATURE_MIN = 0.01

# The allowed values, as error messages and the OpenAPI schema state them.
ALLOWED = {
    "n": f"an integer from 1 to {CHOICES_MAX}, or to {BEAMS_MAX} with use_beam_search; n times the "
    f"number of prompts must be at most {CHOICES_MAX}",
    "temperature": "a number from 0 (greedy) to 2",
    "top_p": "a number from 0 (greedy) to 1",
    "top_k": "an integer: -1 or 0 (off), or a count of tokens",
    "min_p": "a number from 0 (off) to 1",
    "seed": "an integer from -2^63 to 2^64-1",
    "max_tokens": "an integer of at least 1, or 0 with echo in a completion request",
    "min_tokens": "an integer from 0 to max_tokens",
    "stop": f"a non-empty string of at most {STOP_CHARACTERS_MAX} characters, or a list of at "
    f"most {STOP_STRINGS_MAX} such strings",
    "stop_token_ids": f"a list of at most {STOP_TOKEN_IDS_MAX} token ids of the vocabulary",
    "ignore_eos": "true or false",
    "presence_penalty": "a number from -2 to 2; 0 is off",
    "frequency_penalty": "a number from -2 to 2; 0 is off",
    "repetition_penalty": f"a number from {1 / REPETITION_PENALTY_MAX:g} to "
    f"{REPETITION_PENALTY_MAX:g}; 1 is off",
    "logit_bias": f"an object of at most {BIASES_MAX} token ids, each with a number from "
    f"{-BIAS_MAX:g} to {BIAS_MAX:g}",
    "bad_words": f"a list of at most {BAD_WORDS_MAX} non-empty strings of at most "
    f"{BAD_WORD_CHARACTERS_MAX} characters",
    "logprobs": f"an integer from 0 to {LOGPROBS_MAX}",
    "prompt_logprobs": f"an integer from 0 to {LOGPROBS_MAX}",
    "structured_outputs": "an object with exactly one of json (a JSON schema), json_object (true), "
    "regex, choice (a list of strings) and grammar",
    "skip_special_tokens": "true or false",
    "include_stop_str_in_output": "true or false",
    "truncate_prompt_tokens": "an integer of at least 1, or -1 (as many as fit the context)",
}
_Real = (float, int)
# Numeric parameter -> (type, smallest allowed value, largest allowed value).
_NUMBERS: dict[str, tuple[Any, float, float]] = {
    "n": (int, 1, CHOICES_MAX),
    "temperature": (_Real, 0.0, 2.0),
    "top_p": (_Real, 0.0, 1.0),
    "top_k": (int, -1, _INT32_MAX),
    "min_p": (_Real, 0.0, 1.0),
    "seed": (int, -(2**63), 2**64 - 1),
    "max_tokens": (int, 0, _INT32_MAX),
    "min_tokens": (int, 0, math.inf),
    "presence_penalty": (_Real, -2.0, 2.0),
    "frequency_penalty": (_Real, -2.0, 2.0),
    "repetition_penalty": (_Real, 1 / REPETITION_PENALTY_MAX, REPETITION_PENALTY_MAX),
    "logprobs": (int, 0, LOGPROBS_MAX),
    "prompt_logprobs": (int, 0, LOGPROBS_MAX),
    "truncate_prompt_tokens": (int, -1, math.inf),
}
_OPTIONAL = ("seed", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
_SWITCHES = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True):
    """The required form of a completion. Exactly one of the fields is given."""

    json: str | dict[str, Any] | None = None  # a JSON schema
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are given: field name -> value."""
        return {name: form for name, form in asdict(self).items() if form not in (None, False)}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters of a request: fields of the HTTP API. The constructor raises
    BadRequest for a value that is not allowed, and names the field and the allowed values."""

    n: int = 1
    temperature: float = 1.0  # 0: the most likely token is always chosen (greedy)
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None  # None: a random seed
    max_tokens: int | None = 16  # None: as many as fit the context and the KV pool
    min_tokens: int = 0  # fewest completion tokens; until then, no stop token is sampled
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    presence_penalty: float = 0.0  # subtracted from the logits of tokens that are in the completion
    # If a token occurs n times in the completion, n * frequency_penalty is subtracted from its
    # logit.
    frequency_penalty: float = 0.0
    # Positive logits of tokens in the prompt or the completion are divided by this, and negative
    # ones are multiplied by it.
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None  # token id -> number that is added to the logit
    bad_words: list[str] | None = None
    # Number of most likely tokens that are reported for each completion token, with their log
    # probabilities. None: no log probabilities are reported.
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same as `logprobs`, for the tokens of the prompt
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    # Number of tokens at the end of the prompt that are kept. -1: as many as fit into the context.
    # None: the prompt is not truncated.
    truncate_prompt_tokens: int | None = None
    # `resolved` sets this field and the next one. is_resolved=True: the values have been checked
    # and are not checked again.
    is_resolved: bool = False
    bad_words_token_ids: list[list[int]] = []  # sequences of tokens that no completion may contain

    def __post_init__(self) -> None:
        if not self.is_resolved:
            _check(self)

    def resolved(self, **values: Any) -> Self:
        """Returns a copy for an engine, with `values` for some fields. A `temperature` between 0
        and 0.01 becomes 0.01, and a negative `top_k` (off) becomes 0. A `top_p` of 0 keeps only the
        most likely token, as a `temperature` of 0 does, and becomes that."""
        is_greedy = not (self.temperature and self.top_p)
        own = {
            "temperature": 0.0 if is_greedy else max(self.temperature, _TEMPERATURE_MIN),
            "top_p": self.top_p or 1.0,
            "top_k": max(0, self.top_k),
        }
        return replace(self, **{**own, **values}, is_resolved=True)

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


def refusal_of(name: str, allowed: str, given: object = None, *, why: str = "") -> BadRequest:
    """Returns the error for a field whose value is not one of the `allowed` ones.

    The message shows the given value, or `why`, which describes the value.
    """
    shown = why if given is None else shorten(given)
    shown = f"; it is {shown}" if shown else ""
    return BadRequest(f"{name} must be {allowed}{shown}", param=name)


def _refusal(name: str, given: object = None, *, why: str = "") -> BadRequest:
    return refusal_of(name, ALLOWED[name], given, why=why)


def _wrong_type(name: str) -> BadRequest:
    return BadRequest(f"{name} is not valid; it must be {ALLOWED[name]}", param=name)


def _check(params: SamplingParams) -> None:
    for name, (kind, least, most) in _NUMBERS.items():
        number: Any = getattr(params, name)
        if number is None and name in _OPTIONAL:
            continue
        if not isinstance(number, kind) or number is True or number is False:
            raise _wrong_type(name)
        if not least <= number <= most:  # false for NaN, so NaN is refused
            raise _refusal(name, number)
    for name in _SWITCHES:
        if not isinstance(getattr(params, name), bool):
            raise _wrong_type(name)
    if params.truncate_prompt_tokens == 0:
        raise _refusal("truncate_prompt_tokens", 0)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise _refusal("min_tokens", params.min_tokens)
    _check_texts("stop", params.stop_strings, STOP_STRINGS_MAX, STOP_CHARACTERS_MAX)
    _check_texts("bad_words", params.bad_words, BAD_WORDS_MAX, BAD_WORD_CHARACTERS_MAX)
    _check_list("stop_token_ids", params.stop_token_ids, int, STOP_TOKEN_IDS_MAX)
    _check_biases(params.logit_bias)
    if params.structured_outputs is not None:
        _check_form(params.structured_outputs)


def _check_texts(name: str, texts: object, num_max: int, characters_max: int) -> None:
    for text in _check_list(name, texts, str, num_max):
        if not 0 < len(text) <= characters_max:
            raise _refusal(name, why="a value with an empty or too long string")


def _check_list(name: str, values: object, kind: type, num_max: int) -> list[Any]:
    """Returns the list; an empty one for None. Raises BadRequest for a wrong type or length."""
    if values is None:
        return []
    if not isinstance(values, list) or any(type(value) is not kind for value in values):
        raise _wrong_type(name)
    if len(values) > num_max:
        raise _refusal(name, why=f"a list of {len(values)} items")
    return values


def _check_biases(biases: Any) -> None:
    if not biases and (biases is None or isinstance(biases, dict)):
        return
    if not isinstance(biases, dict) or any(not isinstance(b, _Real) for b in biases.values()):
        raise _wrong_type("logit_bias")
    if any(type(token_id) is not int for token_id in biases):
        raise _refusal("logit_bias", why="an object with a key that is not a token id")
    if len(biases) > BIASES_MAX:
        raise _refusal("logit_bias", why=f"an object of {len(biases)} token ids")
    for bias in biases.values():
        if not -BIAS_MAX <= bias <= BIAS_MAX:
            raise _refusal("logit_bias", bias)


def _check_form(form: StructuredOutputsParams) -> None:
    name = "structured_outputs"
    if not isinstance(form, StructuredOutputsParams):
        raise _wrong_type(name)
    try:
        msgspec.convert(asdict(form), StructuredOutputsParams)
    except msgspec.ValidationError:
        raise _wrong_type(name) from None
    if len(form.given) != 1:
        raise _refusal(name)
    if "" in form.given.values() or [] in form.given.values():
        raise _refusal(name, why="empty")

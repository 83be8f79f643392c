"""The setting --speculative-config: whether and how an engine proposes tokens before it computes
them. The keys of the JSON form are vLLM's. Also the counts of these tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from tandem.errors import ConfigError

# Largest value of num_speculative_tokens. A step computes all proposed tokens of a sequence.
TOKENS_MAX = 64
# Largest number of answers in which other sequences find proposals.
ANSWERS_MAX = 10_000
_METHODS = ("ngram", "suffix", "draft_model")
_OF_METHOD = {
    "ngram": ("prompt_lookup_max", "prompt_lookup_min"),
    "suffix": (
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    ),
    "draft_model": ("model", "revision"),
}


class Speculated(msgspec.Struct, frozen=True):
    """What speculative decoding did for one sequence."""

    proposed_tokens: int = 0  # number of proposed tokens that steps have verified
    accepted_tokens: int = 0
    saved_s: float = 0.0  # predicted seconds that it saved; negative if it took longer


@dataclass(frozen=True, slots=True)
class Speculation:
    """How an engine proposes tokens of a sequence.

    With the methods `ngram` and `suffix`, a proposal is the text that followed the last tokens of
    the sequence where they occurred before: in the sequence itself, or in a recent answer to the
    same tenant. With `draft_model`, a smaller model samples it.
    """

    method: Literal["ngram", "suffix", "draft_model"]
    tokens_max: int  # largest number of tokens in a proposal
    match_min: int = 1  # smallest number of last tokens that must have occurred before
    match_max: int = 1  # number of last tokens that are compared
    # A proposal has at most this number of tokens for each token that matched; None: no limit.
    factor: float | None = None
    probability_min: float = 0.0  # a proposed token has at least this probability
    answers_max: int = 0  # number of recent answers in which proposals are found
    model: str = (
        ""  # the draft model: a folder, a GGUF file or a name on the hub; "": there is none
    )
    revision: str = ""  # commit, tag or branch of a draft model on the hub


class SpeculationStats(msgspec.Struct):
    """Counts of speculative decoding since the start of the engine."""

    num_drafts: int = 0  # number of proposals that a step has verified
    num_draft_tokens: int = 0  # number of tokens in these proposals
    num_accepted_tokens: int = 0  # number of tokens that were equal to the sampled tokens
    # Item i is the number of proposals of which more than i tokens were accepted.
    num_accepted_at: list[int] = []

    def count(self, num_proposed: int, num_accepted: int) -> None:
        """Counts one proposal."""
        self.num_drafts += 1
        self.num_draft_tokens += num_proposed
        self.num_accepted_tokens += num_accepted
        while len(self.num_accepted_at) < num_proposed:
            self.num_accepted_at.append(0)
        for at in range(num_accepted):
            self.num_accepted_at[at] += 1

    def copy(self) -> SpeculationStats:
        """Returns a copy, which does not change any more."""
        return msgspec.structs.replace(self, num_accepted_at=list(self.num_accepted_at))


_AUTO = Speculation("suffix", tokens_max=16, match_min=3, match_max=24, answers_max=ANSWERS_MAX)


def parse_speculation(text: str) -> Speculation | None:
    """Returns what the setting says: "off" (None), "auto" or a JSON object. Raises ConfigError."""
    if text == "off":
        return None
    if text == "auto":
        return _AUTO
    try:
        given = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"speculative-config is {text!r}; it must be auto, off or a JSON object such as "
            f'{{"method": "ngram", "num_speculative_tokens": 8}} ({error})'
        ) from error
    if not isinstance(given, dict):
        raise ConfigError(f"speculative-config is {text}; it must be auto, off or a JSON object")
    return _read(given)


def _read(given: dict[str, Any]) -> Speculation:
    method = given.pop("method", None)
    if method not in _METHODS:
        raise ConfigError(
            f"speculative-config has the method {method!r}; it must be one of: "
            f"{', '.join(_METHODS)}"
        )
    known = ("num_speculative_tokens", *_OF_METHOD[method])
    if unknown := [key for key in given if key not in known]:
        raise ConfigError(
            f"speculative-config has the key {unknown[0]!r}, which the method {method} does not "
            f"have; its keys are: method, {', '.join(known)}"
        )
    if method == "ngram":
        longest = _whole(given, "prompt_lookup_max", given.get("prompt_lookup_min", 5))
        shortest = _whole(given, "prompt_lookup_min", longest)
        if shortest > longest:
            raise ConfigError(
                f"speculative-config has prompt_lookup_min {shortest}, which must not be more than "
                f"prompt_lookup_max {longest}"
            )
        return Speculation(
            "ngram",
            tokens_max=_whole(given, "num_speculative_tokens"),
            match_min=shortest,
            match_max=longest,
        )
    if method == "draft_model":
        return Speculation(
            "draft_model",
            tokens_max=_whole(given, "num_speculative_tokens"),
            model=_text(given, "model"),
            revision=_text(given, "revision", ""),
        )
    depth = _whole(given, "suffix_decoding_max_tree_depth", 24)
    return Speculation(
        "suffix",
        tokens_max=_whole(given, "num_speculative_tokens", 32),
        match_min=min(_AUTO.match_min, depth),
        match_max=depth,
        factor=_number(given, "suffix_decoding_max_spec_factor", 1.0, TOKENS_MAX),
        probability_min=_number(given, "suffix_decoding_min_token_prob", 0.1, 1.0),
        answers_max=_whole(
            given, "suffix_decoding_max_cached_requests", ANSWERS_MAX, range(ANSWERS_MAX + 1)
        ),
    )


def with_draft_at(text: str, model: str) -> str:
    """Returns the setting `text`, which has a draft model, with the model at the path `model`."""
    given = msgspec.json.decode(text)
    given.pop("revision", None)
    return msgspec.json.encode(given | {"model": model}).decode()


def without_draft(text: str) -> str:
    """Returns the setting `text`, or auto in place of one that has a draft model."""
    setting = parse_speculation(text)
    return "auto" if setting is not None and setting.model else text


def _text(given: dict[str, Any], key: str, default: str | None = None) -> str:
    value = given.get(key, default)
    if value is None:
        raise ConfigError(f"speculative-config lacks the key {key}")
    if not isinstance(value, str) or (default is None and not value):
        raise ConfigError(f"speculative-config has {key} {value!r}; it must be a text")
    return value


def _whole(
    given: dict[str, Any],
    key: str,
    default: int | None = None,
    allowed: range = range(1, TOKENS_MAX + 1),
) -> int:
    value = given.get(key, default)
    if value is None:
        raise ConfigError(f"speculative-config lacks the key {key}")
    if type(value) is not int or value not in allowed:
        raise ConfigError(
            f"speculative-config has {key} {value!r}; it must be a whole number from "
            f"{allowed.start} to {allowed.stop - 1}"
        )
    return value


def _number(given: dict[str, Any], key: str, default: float, most: float) -> float:
    value = given.get(key, default)
    if type(value) not in (int, float) or not 0 <= value <= most:
        raise ConfigError(
            f"speculative-config has {key} {value!r}; it must be a number from 0 to {most:g}"
        )
    return float(value)

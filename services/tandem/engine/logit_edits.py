"""Computes the edits of a sequence's logits before a token is sampled: bias, penalties, bans and
masks.

The edits depend on the spec and the token ids only, so they can be rebuilt after a sequence was
migrated, preempted or prefilled on another worker. tandem_kernels/edits.py has the formula and the
order of the edits.
"""

from __future__ import annotations

import numpy as np

from tandem.common.sampling_params import SamplingParams
from tandem.engine.types import SequenceSpec
from tandem.models.grammars.masks import GrammarMatcher, Mask
from tandem_kernels.edits import Edit

_CAPACITY_MIN = 64


def logit_edits(
    spec: SequenceSpec, vocab_size: int, grammar: GrammarMatcher | None = None
) -> LogitEdits | None:
    """Returns the logit edits of a sequence; None if the spec requests no edits. `grammar` tracks
    the position of the completion in the sequence's grammar."""
    sampling = spec.sampling
    bans = sampling.min_tokens > 0 or bool(sampling.bad_words_token_ids)
    if not (grammar or bans or sampling.logit_bias or _has_penalties(sampling)):
        return None
    return LogitEdits(spec, vocab_size, grammar)


class LogitEdits:
    """The edits of the logits from which a sequence's next token is sampled. Each generated token
    must be passed to `append`, because penalties and masks depend on it."""

    def __init__(
        self, spec: SequenceSpec, vocab_size: int, grammar: GrammarMatcher | None = None
    ) -> None:
        self.grammar = grammar
        self._sampling = spec.sampling
        self._has_penalties = _has_penalties(spec.sampling)
        self._stops = tuple(t for t in spec.sampling.stop_token_ids or () if t < vocab_size)
        self._bad_tokens = tuple(w[0] for w in spec.sampling.bad_words_token_ids if len(w) == 1)
        self._bad_runs = [w for w in spec.sampling.bad_words_token_ids if len(w) > 1]
        self._output: list[int] = []
        # Maps the id of each edited token to its index in the arrays below.
        self._places: dict[int, int] = {}
        self._ids = np.zeros(_CAPACITY_MIN, np.int32)
        self._bias, self._scales, self._penalties = (
            np.full(_CAPACITY_MIN, value, np.float32) for value in (0.0, 1.0, 0.0)
        )
        self._counts: dict[int, int] = {}  # number of occurrences of each token id in the output
        for token_id, bias in (spec.sampling.logit_bias or {}).items():
            # `_place` may replace the array `_bias`, so it must run before `self._bias` is read.
            place = self._place(token_id)
            self._bias[place] = bias
        if spec.sampling.repetition_penalty != 1.0:
            for token_id in spec.token_ids[: spec.num_prompt_tokens]:
                place = self._place(token_id)
                self._scales[place] = spec.sampling.repetition_penalty
        for token_id in spec.token_ids[spec.num_prompt_tokens :]:
            self._note(token_id)

    def append(self, token_id: int) -> None:
        """Updates the edits after a token was appended to the completion."""
        if self.grammar is not None:
            self.grammar.append(token_id)
        self._note(token_id)

    def _note(self, token_id: int) -> None:
        self._output.append(token_id)
        if not self._has_penalties:
            return
        sampling = self._sampling
        place = self._place(token_id)
        count = self._counts[token_id] = self._counts.get(token_id, 0) + 1
        self._scales[place] = sampling.repetition_penalty
        self._penalties[place] = sampling.frequency_penalty * count + sampling.presence_penalty

    def edit(self) -> Edit | None:
        """Returns the edit of the next token's logits; None if the edit would change no logit. The
        result is valid until the next call of `append`."""
        banned = self._banned()
        mask = None
        if self.grammar is not None:
            forced = self.grammar.forced
            if forced is not None and forced not in banned:
                mask = _only(forced, len(self.grammar.mask))
            else:
                mask = _without(self.grammar.mask, banned)
            banned = []
        size = len(self._places)
        if not (size or banned or mask is not None):
            return None
        return Edit(
            self._ids[:size],
            self._bias[:size],
            self._scales[:size],
            self._penalties[:size],
            banned,
            mask,
        )

    def find_forced(self) -> int | None:
        """Returns the next token if the grammar allows only one token and it is not banned.
        Otherwise returns None."""
        forced = None if self.grammar is None else self.grammar.find_forced()
        return None if forced is None or forced in self._banned() else forced

    def _banned(self) -> list[int]:
        banned = list(self._bad_tokens)
        if len(self._output) < self._sampling.min_tokens:
            banned += self._stops
        for run in self._bad_runs:
            if self._output[1 - len(run) :] == run[:-1]:
                banned.append(run[-1])
        return banned

    def _place(self, token_id: int) -> int:
        """Returns the token's index in the arrays. A token that is not in the arrays yet is added
        to them."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._bias = np.concatenate((self._bias, np.zeros_like(self._bias)))
            self._penalties = np.concatenate((self._penalties, np.zeros_like(self._penalties)))
            self._scales = np.concatenate((self._scales, np.ones_like(self._scales)))
        self._ids[place] = token_id
        return place


def _only(token_id: int, num_words: int) -> Mask:
    """Returns a mask that allows one token."""
    words = np.zeros(num_words, np.uint32)
    words[token_id // 32] = 1 << token_id % 32
    return words.view(np.int32)


def _without(mask: Mask, banned: list[int]) -> Mask:
    """Returns the mask without the banned tokens.

    If no token would be left, it returns the mask unchanged, because the grammar takes precedence
    over `min_tokens` and `bad_words`.
    """
    if not banned:
        return mask
    left = mask.view(np.uint32).copy()
    for token_id in banned:
        left[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    return left.view(np.int32) if left.any() else mask


def _has_penalties(sampling: SamplingParams) -> bool:
    return (
        sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
        or sampling.repetition_penalty != 1.0
    )

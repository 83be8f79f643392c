"""Proposes the next tokens of one sequence: those that followed its last tokens where these
occurred before, in the prompt, in the answer, or in recent answers to the same tenant.

    prompt   ... def area ( self ) : return self . width ...
    answer   ... def area ( self              proposal: ) : return self . width

Every proposal is compared with the tokens that were sampled in its place, also if no step has
verified the proposal. So the estimated acceptance stays up to date while a sequence does not
speculate, at no cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tandem.common.speculation import Speculated, Speculation
from tandem.engine.speculation.acceptance import Acceptance, Source, kind_of
from tandem.engine.speculation.recent_answers import RecentAnswers, Tenant
from tandem.engine.speculation.token_index import TokenIndex
from tandem.engine.types import SequenceSpec


class Proposal(NamedTuple):
    """Proposed next tokens, and for each the probability that it and all before it are accepted."""

    token_ids: list[int]
    probabilities: list[float]

    def first(self, count: int) -> Proposal:
        """Returns the first `count` tokens."""
        return Proposal(self.token_ids[:count], self.probabilities[:count])


NOTHING = Proposal([], [])


class Proposer(Protocol):
    """Proposes next tokens of one sequence."""

    result: Speculated  # what speculation did for the sequence

    def propose(self, token_ids: Sequence[int]) -> Proposal:
        """Returns the proposal after `token_ids`, the tokens of the sequence. They must begin with
        those of the last call."""


class Drafter:
    """The proposals of one sequence."""

    def __init__(
        self,
        setting: Speculation,
        shared: Acceptance,
        spec: SequenceSpec,
        max_model_len: int,
        recent: RecentAnswers | None = None,
    ) -> None:
        """`shared` is the acceptance of all sequences of the engine."""
        self._setting = setting
        self._recent = recent
        self._tenant = Tenant.of(spec)
        max_tokens = spec.sampling.max_tokens
        self._end = max_model_len  # number of tokens of the sequence at its end
        if max_tokens is not None:
            self._end = min(self._end, spec.num_prompt_tokens + max_tokens)
        self._stops = frozenset(spec.sampling.stop_token_ids or ())
        self._acceptance = Acceptance(shared)
        self._index = TokenIndex(setting.match_min)
        self._guess: list[int] = []  # the last proposal
        self._guessed_at = 0  # number of tokens of the sequence before the last proposal
        self._num_equal = 0  # number of tokens before it that are equal at the earlier occurrence
        self._source = Source.OWN  # where the last proposal was found
        self.result = Speculated()

    def propose(self, token_ids: Sequence[int]) -> Proposal:
        """Returns the proposal after `token_ids`, the tokens of the sequence. They must begin with
        those of the last call."""
        if len(token_ids) != self._guessed_at:
            self._compare(token_ids)
            self._index.extend(token_ids)
            self._guess = self._look_up(token_ids)
            self._guessed_at = len(token_ids)
        if not self._guess:
            return NOTHING
        probability = 1.0
        probabilities = []
        for depth in range(len(self._guess)):
            one = self._acceptance.probability(self._kind(depth))
            if one < self._setting.probability_min:
                break
            probability *= one
            probabilities.append(probability)
        return Proposal(self._guess[: len(probabilities)], probabilities)

    def _compare(self, token_ids: Sequence[int]) -> None:
        """Compares the last proposal with the tokens that took its place."""
        for depth, (guess, token_id) in enumerate(
            zip(self._guess, token_ids[self._guessed_at :], strict=False)
        ):
            self._acceptance.observe(self._kind(depth), guess == token_id)
            if guess != token_id:
                break

    def _kind(self, depth: int) -> int:
        """Returns the kind of the token of the last proposal at index `depth`."""
        return kind_of(self._num_equal + depth, self._source)

    def _look_up(self, token_ids: Sequence[int]) -> list[int]:
        setting = self._setting
        # One more token is sampled after the last proposed token.
        most = min(setting.tokens_max, self._end - len(token_ids) - 1)
        if most < 1:
            return []
        self._source = Source.OWN
        start, self._num_equal = self._index.find(token_ids, setting.match_max)
        if self._recent is not None:
            at, num_equal = self._recent.find(self._tenant, token_ids, setting.match_max)
            if at and self._is_better(num_equal):
                start, self._num_equal, self._source = at, num_equal, Source.RECENT
        if setting.factor is not None:
            most = min(most, int(setting.factor * self._num_equal))
        if not start or most < 1:
            return []
        if self._source is Source.RECENT:
            assert self._recent is not None
            found = self._recent.after(start, most)
        else:
            found = list(token_ids[start : start + most])
            # The earlier occurrence may be so close that the proposal repeats itself.
            for at in range(len(found), most):
                found.append(found[at - (len(token_ids) - start)])
        # No token follows a stop token. It is sampled after the tokens before it.
        ends = (at for at, token_id in enumerate(found) if token_id in self._stops)
        return found[: next(ends, most)]

    def _is_better(self, num_equal: int) -> bool:
        """Returns whether a recent answer with so many equal tokens is a better source than the
        sequence's own tokens: it has more equal tokens, or as many that are accepted more often."""
        if num_equal != self._num_equal:
            return num_equal > self._num_equal
        recent, own = (
            self._acceptance.probability(kind_of(num_equal, source))
            for source in (Source.RECENT, Source.OWN)
        )
        return recent > own

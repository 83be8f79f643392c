"""The proposals of a draft model for one sequence.

The draft model samples each proposed token with the sequence's own sampling parameters, seed and
position. So a draft model that predicts what the model predicts proposes what the model samples.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.common.speculation import Speculated
from tandem.engine.speculation.acceptance import Acceptance
from tandem.engine.speculation.drafter import NOTHING, Proposal
from tandem.engine.types import SequenceSpec

_KIND = 0  # all tokens of a draft model are of one kind


class ModelDrafter:
    """The last proposal for one sequence, and how many such tokens were accepted.

    A proposal that no step has verified is compared with the tokens that are sampled in its place,
    so it shows at no cost whether the next one would pay.
    """

    def __init__(self, shared: Acceptance, spec: SequenceSpec, max_model_len: int) -> None:
        """`shared` is the acceptance of all sequences of the engine."""
        self._acceptance = Acceptance(shared)
        max_tokens = spec.sampling.max_tokens
        self._end = max_model_len  # number of tokens of the sequence at its end
        if max_tokens is not None:
            self._end = min(self._end, spec.num_prompt_tokens + max_tokens)
        self._stops = frozenset(spec.sampling.stop_token_ids or ())
        self._guess: list[int] = []  # the last proposal, without tokens that were compared
        self._guessed_at = 0  # number of tokens of the sequence before the last proposal
        self.result = Speculated()

    @property
    def probability(self) -> float:
        """The estimated probability that a proposed token is accepted, if all before it are."""
        return self._acceptance.probability(_KIND)

    def num_left(self, token_ids: Sequence[int]) -> int:
        """Returns how many tokens the sequence may still get after `token_ids`."""
        return self._end - len(token_ids)

    def awaits_tokens(self, token_ids: Sequence[int]) -> bool:
        """Compares the last proposal with the tokens that took its place. Returns whether tokens of
        the proposal are left to compare."""
        while self._guess and self._guessed_at < len(token_ids):
            is_accepted = self._guess.pop(0) == token_ids[self._guessed_at]
            self._acceptance.observe(_KIND, is_accepted)
            self._guessed_at += 1
            if not is_accepted:
                self._guess = []
        return bool(self._guess)

    def put(self, token_ids: Sequence[int], guess: Sequence[int]) -> None:
        """Sets the proposal after `token_ids`."""
        self._guess = list(guess)
        self._guessed_at = len(token_ids)

    def propose(self, token_ids: Sequence[int]) -> Proposal:
        """Returns the proposal after `token_ids`, the tokens of the sequence."""
        if not self._guess or len(token_ids) != self._guessed_at:
            return NOTHING
        # No token follows a stop token. It is sampled after the tokens before it.
        ends = (at for at, token_id in enumerate(self._guess) if token_id in self._stops)
        count = next(ends, len(self._guess))
        one = self.probability
        return Proposal(self._guess[:count], [one**at for at in range(1, count + 1)])

"""Estimates how likely a proposed token is the token that the model samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum


class Source(IntEnum):
    """Where a proposed token was found."""

    OWN = 0  # in the sequence's own tokens
    RECENT = 1  # in a recent answer to another request


# Kinds of proposed tokens of one source, by how many tokens before them are equal to those of the
# earlier occurrence: up to 3, 4 to 7, 8 to 15, and more.
_NUM_KINDS = 4
# Assumed acceptance of each kind before anything was measured, and the number of tokens for which
# this assumption counts.
_ASSUMED = (0.3, 0.5, 0.7, 0.85) * len(Source)
_ASSUMED_WEIGHT = 4.0
# With each new token of a kind, the weight of the earlier ones is multiplied by this. So the
# estimate of one sequence depends mainly on its last 25 tokens.
_KEEP = 0.96
_KEEP_SHARED = 0.998
# The estimates of one sequence are from few tokens, so the highest ones are mostly too high. They
# are corrected by the acceptance of all tokens with about the same estimate. Estimates p are put
# together by 1 - p: two levels for each halving. The estimate itself counts for so many tokens.
_NUM_LEVELS = 12
_LEVEL_WEIGHT = 16.0
# Assumed acceptance of the tokens of a draft model. Whether it is a good one is soon known.
DRAFT_MODEL = (0.6,)


def kind_of(num_equal: int, source: Source = Source.OWN) -> int:
    """Returns the kind of a proposed token after `num_equal` equal tokens."""
    return source * _NUM_KINDS + min(_NUM_KINDS - 1, max(0, num_equal.bit_length() - 2))


class Acceptance:
    """The measured acceptance of proposed tokens. That of one sequence starts from `shared`, the
    acceptance of all sequences of the engine."""

    def __init__(
        self, shared: Acceptance | None = None, assumed: Sequence[float] = _ASSUMED
    ) -> None:
        """`assumed` has the acceptance of each kind before anything was measured."""
        self._shared = shared
        self._kinds = _Rates(len(assumed), _KEEP_SHARED if shared is None else _KEEP)
        self._assumed: Sequence[float] = assumed if shared is None else shared._assumed
        # By level: the acceptance of tokens that had about the same estimate in their sequence.
        self._levels = _Rates(_NUM_LEVELS, _KEEP_SHARED)

    def observe(self, kind: int, is_accepted: bool) -> None:
        """Counts a proposed token."""
        if self._shared is not None:
            self._shared._levels.observe(_level_of(self._estimate(kind)), is_accepted)
            self._shared.observe(kind, is_accepted)
        self._kinds.observe(kind, is_accepted)

    def probability(self, kind: int) -> float:
        """Returns the estimated probability that a proposed token of this kind is accepted."""
        estimate = self._estimate(kind)
        if self._shared is None:
            return estimate
        return self._shared._levels.mean(_level_of(estimate), estimate, _LEVEL_WEIGHT)

    def _estimate(self, kind: int) -> float:
        """Returns the estimate that is not corrected by its level."""
        shared = self._shared
        assumed = self._assumed[kind] if shared is None else shared._estimate(kind)
        return self._kinds.mean(kind, assumed, _ASSUMED_WEIGHT)


class _Rates:
    """Shares of accepted tokens, with forgetting."""

    def __init__(self, size: int, keep: float) -> None:
        self._keep = keep
        self._hits = [0.0] * size
        self._trials = [0.0] * size

    def observe(self, at: int, is_accepted: bool) -> None:
        self._hits[at] = self._keep * self._hits[at] + is_accepted
        self._trials[at] = self._keep * self._trials[at] + 1

    def mean(self, at: int, assumed: float, weight: float) -> float:
        """Returns the share, with `weight` more tokens of which the share `assumed` is accepted."""
        return (self._hits[at] + weight * assumed) / (self._trials[at] + weight)


def _level_of(estimate: float) -> int:
    highest = _NUM_LEVELS - 1
    if estimate >= 1 - 2 ** (-highest / 2):
        return highest
    return int(-2 * math.log2(1 - estimate))

"""Estimates how likely a proposed token is the token that the model samples."""

from __future__ import annotations

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
_ASSUMED = (0.3, 0.5, 0.7, 0.85)
_ASSUMED_WEIGHT = 4.0
# With each new token of a kind, the weight of the earlier ones is multiplied by this. So the
# estimate of one sequence depends mainly on its last 25 tokens.
_KEEP = 0.96
_KEEP_SHARED = 0.998


def kind_of(num_equal: int, source: Source = Source.OWN) -> int:
    """Returns the kind of a proposed token after `num_equal` equal tokens."""
    return source * _NUM_KINDS + min(_NUM_KINDS - 1, max(0, num_equal.bit_length() - 2))


class Acceptance:
    """The measured acceptance of proposed tokens. That of one sequence starts from `shared`, the
    acceptance of all sequences of the engine."""

    def __init__(self, shared: Acceptance | None = None) -> None:
        self._shared = shared
        self._keep = _KEEP_SHARED if shared is None else _KEEP
        self._hits = [0.0] * _NUM_KINDS * len(Source)
        self._trials = [0.0] * _NUM_KINDS * len(Source)

    def observe(self, kind: int, is_accepted: bool) -> None:
        """Counts a proposed token."""
        self._hits[kind] = self._keep * self._hits[kind] + is_accepted
        self._trials[kind] = self._keep * self._trials[kind] + 1
        if self._shared is not None:
            self._shared.observe(kind, is_accepted)

    def probability(self, kind: int) -> float:
        """Returns the estimated probability that a proposed token of this kind is accepted."""
        assumed = (
            _ASSUMED[kind % _NUM_KINDS] if self._shared is None else self._shared.probability(kind)
        )
        hits = self._hits[kind] + _ASSUMED_WEIGHT * assumed
        return hits / (self._trials[kind] + _ASSUMED_WEIGHT)

"""Finds where the last tokens of a list occurred before. Each appended token costs the same time,
however long the list is."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

# Number of earlier occurrences that are compared, newest first.
COMPARED_MAX = 8
_SIZE_MIN = 256
_BULK_MIN = 64  # with fewer new tokens, a loop is faster than numpy
_FACTOR = 0x9E3779B1  # 2^32 divided by the golden ratio, which spreads hash values evenly
_WORD = 0xFFFFFFFF

Position = TypeVar("Position", np.int32, np.int64)


class TokenIndex:
    """The positions of all runs of `num_tokens` tokens in a list of token ids that only grows.

    It takes 12 to 16 bytes per token. Runs with the same hash are linked from the newest to the
    oldest, as in LZ77 compression:

        _newest[hash] -> position of the run's last token -> _before[position] -> ...  -> -1
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._bits = 0
        self._newest = array("i")
        self._before = array("i")

    def extend(self, token_ids: Sequence[int]) -> None:
        """Adds the tokens of the list that were appended since the last call."""
        first = len(self._before)
        if len(token_ids) > len(self._newest) // 2:
            self._bits = max(_SIZE_MIN, 4 * len(token_ids)).bit_length() - 1
            self._newest = array("i", [-1]) * (1 << self._bits)
            self._before = array("i")
            first = 0
        if len(token_ids) - first >= _BULK_MIN:
            self._extend_many(token_ids, first)
            return
        newest, before = self._newest, self._before
        for position in range(first, len(token_ids)):
            if position + 1 < self._num_tokens:
                before.append(-1)
                continue
            place = self._hash(token_ids, position)
            before.append(newest[place])
            newest[place] = position

    def find(self, token_ids: Sequence[int], most: int) -> tuple[int, int]:
        """Returns (position after the best earlier occurrence of the list's last tokens, number of
        tokens that are equal there, up to `most`). Returns (0, 0) if there is none.

        The best occurrence has the most equal tokens. Of several, it is the newest one. All tokens
        must have been added.
        """
        last = len(token_ids) - 1
        if last < self._num_tokens:
            return 0, 0
        best, best_length = 0, 0
        at = self._before[last]
        for _ in range(COMPARED_MAX):
            if at < 0:
                break
            length = 0
            longest = min(most, at + 1)
            while length < longest and token_ids[at - length] == token_ids[last - length]:
                length += 1
            if length > best_length:
                best, best_length = at + 1, length
                if length == most:
                    break
            at = self._before[at]
        return (best, best_length) if best_length >= self._num_tokens else (0, 0)

    def _hash(self, token_ids: Sequence[int], position: int) -> int:
        return run_hash(token_ids, position, self._num_tokens) >> (32 - self._bits)

    def _extend_many(self, token_ids: Sequence[int], first: int) -> None:
        """Adds many tokens at once, with the same result as `_hash` for each."""
        num_tokens = self._num_tokens
        start = max(first, num_tokens - 1)
        self._before.extend([-1] * (start - first))
        if start >= len(token_ids):
            return
        tokens = np.array(token_ids[start + 1 - num_tokens :], np.uint64)
        places = run_hashes(tokens, num_tokens) >> np.uint64(32 - self._bits)
        newest = np.frombuffer(self._newest, np.int32)
        self._before.frombytes(link(places.astype(np.int64), newest, start).tobytes())


def run_hash(token_ids: Sequence[int], last: int, num_tokens: int, seed: int = 0) -> int:
    """Returns a hash of 32 bits of the `num_tokens` tokens up to and with index `last`."""
    value = seed
    for at in range(last + 1 - num_tokens, last + 1):
        value = ((value + token_ids[at]) * _FACTOR) & _WORD
    return value


def run_hashes(
    tokens: npt.NDArray[np.uint64], num_tokens: int, seed: int = 0
) -> npt.NDArray[np.uint64]:
    """Returns `run_hash` of each run of `num_tokens` tokens, in order. There must be one."""
    count = len(tokens) + 1 - num_tokens
    values = np.full(count, seed, np.uint64)
    for at in range(num_tokens):
        values = ((values + tokens[at : at + count]) * np.uint64(_FACTOR)) & np.uint64(_WORD)
    return values


def link(
    places: npt.NDArray[np.int64], newest: npt.NDArray[Position], start: int
) -> npt.NDArray[Position]:
    """Links runs with the same hash. Run i, whose last token has the position `start` + i, has the
    hash `places[i]`. Returns the position of the run before each, and puts the positions of the
    last ones into `newest`."""
    before = newest[places]
    # In this order, runs with the same hash are neighbours, the oldest first.
    order = np.argsort(places, kind="stable")
    is_same = places[order[1:]] == places[order[:-1]]
    same = np.flatnonzero(is_same)
    before[order[same + 1]] = order[same] + start
    last = order[np.append(~is_same, True)]
    newest[places[last]] = last + start
    return before

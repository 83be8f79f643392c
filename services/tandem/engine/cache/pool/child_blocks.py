"""Finds the cached block that has the longest common start with the next tokens of a prompt.

The children of a block are the cached blocks that may follow it. They are sorted by their tokens,
so the best match is directly before or after the position at which the prompt's tokens would be
inserted. For example, of the children (5 1 3), (5 7 2) and (9 2 4), the best match for the tokens
(5 7 9) is the second, with two equal tokens. It is just before the position of insertion.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

_TOKEN_BYTES = 4


class PartialMatch(NamedTuple):
    """A cached block whose first `num_tokens` tokens are equal to the next tokens of a prompt."""

    num_tokens: int
    block_hash: bytes


class ChildBlocks:
    def __init__(self) -> None:
        # Maps a parent's hash to the sorted (tokens, hash) pairs of its children.
        self._children: dict[bytes, list[tuple[bytes, bytes]]] = {}
        # Maps a block's hash to (its parent's hash, its tokens).
        self._places: dict[bytes, tuple[bytes, bytes]] = {}

    def add(self, parent_hash: bytes, block_hash: bytes, token_ids: Sequence[int]) -> None:
        """Adds the block `block_hash`, which has these tokens and this parent."""
        packed = _pack(token_ids)
        self._places[block_hash] = parent_hash, packed
        insort(self._children.setdefault(parent_hash, []), (packed, block_hash))

    def remove(self, block_hash: bytes) -> None:
        """Removes a block. Does nothing if the block was not added."""
        if (place := self._places.pop(block_hash, None)) is None:
            return
        parent_hash, packed = place
        siblings = self._children[parent_hash]
        del siblings[bisect_left(siblings, (packed, block_hash))]
        if not siblings:
            del self._children[parent_hash]

    def closest(self, parent_hash: bytes, token_ids: Sequence[int]) -> list[PartialMatch]:
        """Returns at most two children of a parent that begin with the same token as `token_ids`,
        the longest match first."""
        siblings = self._children.get(parent_hash)
        if not siblings or not token_ids:
            return []
        wanted = _pack(token_ids)
        place = bisect_left(siblings, (wanted,))
        found = [
            PartialMatch(_num_common(wanted, packed), block_hash)
            for packed, block_hash in siblings[max(0, place - 1) : place + 1]
        ]
        return sorted((each for each in found if each.num_tokens), reverse=True)

    def block_hashes(self) -> set[bytes]:
        """Returns the hashes of all blocks that were added and not removed."""
        return set(self._places)


def _pack(token_ids: Sequence[int]) -> bytes:
    """Packs token ids into bytes that sort in the same order as lists of ids do."""
    return struct.pack(f">{len(token_ids)}I", *token_ids)


def _num_common(wanted: bytes, packed: bytes) -> int:
    """Returns how many first tokens are equal in two packed lists, which may differ in length."""
    size = min(len(wanted), len(packed))
    differing = int.from_bytes(wanted[:size]) ^ int.from_bytes(packed[:size])
    return (size - -(-differing.bit_length() // 8)) // _TOKEN_BYTES

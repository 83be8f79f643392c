"""The cached blocks of a pool by their parents, to find the block that shares the most first tokens
with the next tokens of a prompt.

The children of a parent are sorted by their tokens, so the child with the longest common beginning
is adjacent to the position at which the prompt's tokens would be inserted.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

_TOKEN_BYTES = 4


class PartialMatch(NamedTuple):
    """A block, and the number of its first tokens that are equal to those of the prompt."""

    num_tokens: int
    block_hash: bytes


class ChildBlocks:
    def __init__(self) -> None:
        # (tokens, hash) of each child, by parent
        self._children: dict[bytes, list[tuple[bytes, bytes]]] = {}
        self._places: dict[bytes, tuple[bytes, bytes]] = {}  # (parent, tokens) by hash

    def add(self, parent_hash: bytes, block_hash: bytes, token_ids: Sequence[int]) -> None:
        """Adds a block with these tokens."""
        packed = _pack(token_ids)
        self._places[block_hash] = parent_hash, packed
        insort(self._children.setdefault(parent_hash, []), (packed, block_hash))

    def remove(self, block_hash: bytes) -> None:
        """Removes a block. Ignores unknown ones."""
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
    """Returns bytes that sort as the tokens do."""
    return struct.pack(f">{len(token_ids)}I", *token_ids)


def _num_common(wanted: bytes, packed: bytes) -> int:
    """Returns the number of equal first tokens. `packed` may be longer or shorter than `wanted`."""
    size = min(len(wanted), len(packed))
    differing = int.from_bytes(wanted[:size]) ^ int.from_bytes(packed[:size])
    return (size - -(-differing.bit_length() // 8)) // _TOKEN_BYTES

"""The cached blocks of a pool by their parents: finds the one that begins as a prompt goes on.

A parent's blocks are sorted by their tokens, so the one with the longest common beginning is next
to the place where the wanted tokens would stand.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

_TOKEN_BYTES = 4


class Beginning(NamedTuple):
    """A block that has the wanted tokens, as far as it goes on as they do."""

    num_tokens: int
    block_hash: bytes


class ChildBlocks:
    def __init__(self) -> None:
        self._children: dict[bytes, list[tuple[bytes, bytes]]] = {}  # (tokens, hash) by parent
        self._places: dict[bytes, tuple[bytes, bytes]] = {}  # (parent, tokens) by hash

    def add(self, parent_hash: bytes, block_hash: bytes, token_ids: Sequence[int]) -> None:
        """A block with these tokens can be found from now on."""
        packed = _pack(token_ids)
        self._places[block_hash] = parent_hash, packed
        insort(self._children.setdefault(parent_hash, []), (packed, block_hash))

    def remove(self, block_hash: bytes) -> None:
        """The block cannot be found any more; unknown ones are ignored."""
        if (place := self._places.pop(block_hash, None)) is None:
            return
        parent_hash, packed = place
        siblings = self._children[parent_hash]
        del siblings[bisect_left(siblings, (packed, block_hash))]
        if not siblings:
            del self._children[parent_hash]

    def closest(self, parent_hash: bytes, token_ids: Sequence[int]) -> list[Beginning]:
        """Returns at most two children that begin as `token_ids` do, the best one first."""
        siblings = self._children.get(parent_hash)
        if not siblings or not token_ids:
            return []
        wanted = _pack(token_ids)
        place = bisect_left(siblings, (wanted,))
        found = [
            Beginning(_num_common(wanted, packed), block_hash)
            for packed, block_hash in siblings[max(0, place - 1) : place + 1]
        ]
        return sorted((each for each in found if each.num_tokens), reverse=True)

    def block_hashes(self) -> set[bytes]:
        """All blocks that can be found."""
        return set(self._places)


def _pack(token_ids: Sequence[int]) -> bytes:
    """Bytes that sort as the tokens do."""
    return struct.pack(f">{len(token_ids)}I", *token_ids)


def _num_common(wanted: bytes, packed: bytes) -> int:
    """Returns how many first tokens are the same. `packed` may be longer, or shorter."""
    size = min(len(wanted), len(packed))
    differing = int.from_bytes(wanted[:size]) ^ int.from_bytes(packed[:size])
    return (size - -(-differing.bit_length() // 8)) // _TOKEN_BYTES

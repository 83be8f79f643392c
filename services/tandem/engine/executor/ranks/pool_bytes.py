"""Reads and writes whole blocks whose heads are divided among the pools of several ranks.

Heads are the outermost axis of a block, so a block is the bytes of its ranks, one after the other:

    block    | heads of rank 0 | heads of rank 1 | ...

Ranks with the same heads (replicas) have the same bytes, which are in the block once. A slot of
states is transferred in pieces. A piece may have bytes of one rank or of several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.cache.layout.pool_bytes import pool_bytes
from tandem.engine.cache.layout.rank_heads import RankHeads
from tandem.engine.executor.rank_memory import RankMemory
from tandem.engine.executor.ranks import messages
from tandem.engine.executor.ranks.shared_memory import SharedMemoryCollectives
from tandem.errors import InternalError

Bytes = NDArray[np.uint8]


class RankPoolBytes:
    """The bytes of whole blocks, as those of `PoolBytes`. Rank 0 calls `read` and `write`, and the
    other ranks call `collect` and `distribute` with the same blocks."""

    def __init__(
        self,
        kv: torch.Tensor,
        layout: KvLayout,
        memory: RankMemory,
        ranks: SharedMemoryCollectives,
    ) -> None:
        """`kv` is the memory of this rank's pools, and `layout` that of whole blocks."""
        share = ranks.share
        self._layout = layout
        self._spans = layout.spans
        self._own = pool_bytes(kv, layout.of_rank(share.num_ranks))
        self._groups = _groups(layout, share.num_ranks)
        self._rank = share.rank
        self._memory = memory
        self._ranks = ranks
        self.read_probe = self._own.read_probe
        self.write_probe = self._own.write_probe

    def read(self, block_ids: list[int]) -> memoryview:
        """Returns a copy of the blocks' bytes, concatenated in the order of `block_ids`."""
        self._memory.post(messages.ReadBlocks(block_ids))
        parts = self.collect(block_ids)
        whole = np.empty(self.num_bytes(block_ids), np.uint8)
        at = first = 0
        for block_id in block_ids:
            block = self._block(block_id)
            for rank, own in block.parts:
                whole[at + own.start : at + own.stop] = parts[rank][first : first + len(own)]
            at += block.num_bytes
            first += block.width
        return whole.data.cast("B")

    def write(self, block_ids: list[int], data: bytes | memoryview) -> None:
        """Copies `data`, the concatenated bytes of these blocks, into the pools of all ranks.
        Raises InternalError if the size does not match."""
        whole = np.frombuffer(data, np.uint8)
        if (expected := self.num_bytes(block_ids)) != len(whole):
            raise InternalError(
                f"{len(block_ids)} KV blocks have {expected} bytes, but {len(whole)} bytes were "
                "given"
            )
        self._memory.post(messages.WriteBlocks(block_ids), whole.data)
        self.distribute(block_ids, whole)

    def num_bytes(self, block_ids: Sequence[int]) -> int:
        """Returns the total bytes of whole blocks."""
        return self._spans.num_bytes(block_ids)

    def collect(self, block_ids: list[int]) -> list[Bytes]:
        """Returns each rank's part of the blocks. A rank's part of a block is followed by unused
        bytes up to the widest part of a rank. Valid until the next exchange but one."""
        blocks = list(map(self._block, block_ids))
        read = np.frombuffer(self._own.read_spans([block.memory for block in blocks]), np.uint8)
        own = np.zeros(sum(block.width for block in blocks), np.uint8)
        at = first = 0
        for block in blocks:
            size = len(block.own)
            own[at : at + size] = read[first : first + size]
            at += block.width
            first += size
        found = self._ranks.exchange_equal(torch.from_numpy(own))
        return [part.numpy() for part in found]

    def distribute(self, block_ids: list[int], whole: Bytes) -> None:
        """Copies this rank's part of the blocks into its pools."""
        own, spans = [], []
        at = 0
        for block in map(self._block, block_ids):
            own.append(whole[at + block.own.start : at + block.own.stop])
            spans.append(block.memory)
            at += block.num_bytes
        self._own.write_spans(spans, np.concatenate(own).data.cast("B"))

    def _block(self, block_id: int) -> _Block:
        number, block = self._layout.locate(block_id)
        group = self._groups[number]
        size = group.num_bytes
        local = block_id - group.first_id
        piece = range(local % group.num_pieces * size, (local % group.num_pieces + 1) * size)
        inside = [_inside(own, piece) for own in group.ranges]
        ours = group.ranges[self._rank]
        own = inside[self._rank]
        # of this rank's bytes of the block, those before the piece
        before = max(ours.start, min(piece.start, ours.stop)) - ours.start
        first = group.memory_at + block * len(ours) + before
        return _Block(
            num_bytes=size,
            width=max(map(len, inside)),
            parts=[(rank, inside[rank]) for rank in range(0, len(inside), group.replicas)],
            own=own,
            memory=slice(first, first + len(own)),
        )


class _Group(NamedTuple):
    """The blocks of one KV group."""

    first_id: int
    num_pieces: int
    num_bytes: int  # of a block, or of a piece of a slot
    ranges: list[range]  # the bytes of a block or slot that each rank has
    replicas: int  # number of consecutive ranks with the same bytes
    memory_at: int  # the place of the group's pool in the memory of a rank


class _Block(NamedTuple):
    """A block, or a piece of a slot."""

    num_bytes: int
    width: int  # the bytes of the rank that has most of them
    parts: list[tuple[int, range]]  # ranks that have all of its bytes together, and which they have
    own: range  # the bytes that this rank has
    memory: slice  # their place in the memory of this rank


def _groups(layout: KvLayout, num_ranks: int) -> list[_Group]:
    found = []
    memory_at = 0
    own = layout.of_rank(num_ranks)
    for group, first_id, of_rank in zip(layout.groups, layout.first_ids, own.groups, strict=True):
        heads = RankHeads(group.layout.num_kv_heads, num_ranks)
        # A single head has the keys of indexers, too.
        size = group.layout.block_bytes // group.layout.num_kv_heads
        held = [heads.of(rank) for rank in range(num_ranks)]
        found.append(
            _Group(
                first_id,
                group.num_pieces,
                group.layout.block_bytes // group.num_pieces,
                [range(each.start * size, each.stop * size) for each in held],
                heads.replicas,
                memory_at,
            )
        )
        memory_at += of_rank.layout.pool_bytes
    return found


def _inside(own: range, piece: range) -> range:
    """Returns the bytes of `own` that are in a piece, counted from the piece's first byte."""
    first, end = max(own.start, piece.start), min(own.stop, piece.stop)
    return range(first - piece.start, end - piece.start) if first < end else range(0)

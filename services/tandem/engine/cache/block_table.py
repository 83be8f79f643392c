"""Block tables of sequences and chains, one for each KV group.

The first blocks of a table are stored (hashed, shared, never written). The other blocks are own
blocks: only this sequence or chain references and writes them. Blocks that no later token sees are
not referenced any more, and their entries become NULL_BLOCK. Examples by the kind of group:

    full attention   [ stored  stored  stored  stored | own ]
    window           [ NULL    NULL    stored  stored | own ]    the first 2 blocks are passed
    KV budget        [ own     NULL    own     own          ]    block 0 is kept; block 1 is passed
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tandem.errors import InternalError

if TYPE_CHECKING:
    from tandem.engine.cache.heavy_hitters import HeavyHitters
    from tandem.engine.cache.layout.kv_groups import KvLayout

NULL_BLOCK = -1


class UnfilledBlock(NamedTuple):
    """A block in a table whose KV is not yet in the pool."""

    group: int
    chain_index: int
    block_id: int  # an id in the group's pool


@dataclass(slots=True)
class BlockTables:
    """`ids[g][i]` is the id of block i in the pool of group g.

    The entries `kept[g]` to `firsts[g]` - 1 of a group are NULL_BLOCK; no kernel reads them.
    """

    ids: list[list[int]] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    budget: KvLayout | None = None  # the layout under the sequence's KV budget; None without one
    # Set if the KV budget keeps heavy hitters. The table then has only the blocks that are kept.
    hitters: HeavyHitters | None = None

    def __bool__(self) -> bool:
        return bool(self.ids)

    @property
    def num_evicted_tokens(self) -> int:
        """Number of computed tokens whose blocks were evicted and are no longer in the tables."""
        return 0 if self.hitters is None else self.hitters.num_evicted_tokens

    def num_full(self, num_computed: int) -> int:
        """Returns the number of blocks in the first group's table that have KV once the first
        `num_computed` tokens are computed. The last one may be partly filled."""
        return len(self.ids[0]) if self.hitters is None else self.hitters.num_blocks(num_computed)

    def evict(self, num_computed: int) -> None:
        """Evicts blocks if `num_computed` is an eviction point. May only be called between
        steps."""
        if self.hitters is not None:
            self.hitters.evict(self.ids[0], num_computed)

    def block_sums(self, num_computed: int) -> list[float]:
        """Returns the attention sums of the blocks, which a peer needs to continue the sequence;
        empty without heavy hitters."""
        if self.hitters is None:
            return []
        sums: list[float] = self.hitters.sums(num_computed - self.num_evicted_tokens).tolist()
        return sums

    def set_sums(self, num_computed: int, sums: list[float]) -> None:
        """Takes over the `block_sums` of a peer. Raises InternalError if their number is wrong."""
        if self.hitters is not None:
            self.hitters.set_sums(num_computed, sums)

    def held(self, group: int, first: int = 0) -> list[int]:
        """Returns the ids of the referenced blocks in a group, from index `first` on."""
        ids = self.ids[group]
        kept = ids[first : self.kept[group]] if self.kept else []
        return kept + ids[max(first, self.firsts[group]) :]


def check_own(sequence_id: str, own: Collection[int], unsafe: Collection[int]) -> None:
    """Raises InternalError if a block in `unsafe` is not one of the sequence's `own` blocks."""
    if strangers := set(unsafe).difference(own):
        raise InternalError(
            f"blocks {sorted(strangers)} are not own blocks of sequence {sequence_id}"
        )


def check_trusted(sequence_id: str, num_blocks: int, num_stored: int, num_held: int) -> None:
    """Raises InternalError unless `num_stored` <= `num_blocks` <= `num_held`.

    The first `num_blocks` of a sequence's `num_held` blocks are reported as trusted. They must
    include all stored blocks.
    """
    if not num_stored <= num_blocks <= num_held:
        raise InternalError(
            f"{num_blocks} blocks of sequence {sequence_id} are said to be good; it has "
            f"{num_held}, and {num_stored} of them were here"
        )

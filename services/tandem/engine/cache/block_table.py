"""Block tables of sequences and chains, one for each KV group.

A table's first blocks are stored (hashed, shared, never written), the rest are its owner's own. In
a group with a window, blocks that no later token sees are not held any more:

    full    [ stored  stored  stored  stored | own ]
    window  [ NULL    NULL    stored  stored | own ]
                              first
    budget  [ own     NULL    own     own ]         a KV budget's first tokens and its window
             kept             first
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
    """A block of a table that has no KV yet."""

    group: int
    chain_index: int
    block_id: int  # in its group's pool


@dataclass(slots=True)
class BlockTables:
    """`ids[g][i]` is the block of group g that has the i-th tokens, by its id in the group's pool.

    It is NULL_BLOCK from `kept[g]` to `firsts[g]`, and no kernel reads it there.
    """

    ids: list[list[int]] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    budget: KvLayout | None = None  # the layout under the sequence's KV budget; None: it has none
    # What its KV budget keeps, if by attention: the table has no other tokens. None: all.
    hitters: HeavyHitters | None = None

    def __bool__(self) -> bool:
        return bool(self.ids)

    @property
    def num_passed_tokens(self) -> int:
        """Computed tokens of which the tables have nothing, not even NULL_BLOCK."""
        return 0 if self.hitters is None else self.hitters.num_passed_tokens

    def num_full(self, num_computed: int) -> int:
        """Returns how many of the first table's blocks have KV after so many computed tokens, the
        last one maybe in part."""
        return len(self.ids[0]) if self.hitters is None else self.hitters.num_blocks(num_computed)

    def evict(self, num_computed: int) -> None:
        """Lets blocks leave if so many computed tokens are a border. Only between steps."""
        if self.hitters is not None:
            self.hitters.evict(self.ids[0], num_computed)

    def block_sums(self, num_computed: int) -> list[float]:
        """Returns what a peer needs besides KV of so many tokens; empty without heavy hitters."""
        if self.hitters is None:
            return []
        sums: list[float] = self.hitters.sums(num_computed - self.num_passed_tokens).tolist()
        return sums

    def take_sums(self, num_computed: int, sums: list[float]) -> None:
        """Takes `block_sums` of a peer. Raises InternalError when they are of other blocks."""
        if self.hitters is not None:
            self.hitters.take(num_computed, sums)

    def held(self, group: int, first: int = 0) -> list[int]:
        """Returns the blocks that it references, from the index `first` on."""
        ids = self.ids[group]
        kept = ids[first : self.kept[group]] if self.kept else []
        return kept + ids[max(first, self.firsts[group]) :]


def check_own(sequence_id: str, own: Collection[int], unsafe: Collection[int]) -> None:
    """Raises InternalError when an unsafe block is not among the blocks that the sequence owns."""
    if strangers := set(unsafe).difference(own):
        raise InternalError(
            f"blocks {sorted(strangers)} are not own blocks of sequence {sequence_id}"
        )


def check_trusted(sequence_id: str, num_blocks: int, num_stored: int, num_held: int) -> None:
    """Raises InternalError when the table's first `num_blocks` blocks cannot all be good."""
    if not num_stored <= num_blocks <= num_held:
        raise InternalError(
            f"{num_blocks} blocks of sequence {sequence_id} are said to be good; it has "
            f"{num_held}, and {num_stored} of them were here"
        )

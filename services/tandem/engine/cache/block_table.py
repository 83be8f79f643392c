"""Block tables: the ids of the blocks that hold the KV of a sequence, one table for each KV group.
A chain of blocks that a peer pulls from this worker, or this worker from a peer, has tables too.

The entry i of a table is for the block with index i in the sequence. An entry is one of these:

- stored: a block that is cached under its hash. Sequences may share it. It is never written again.
- own: a block that only this table references. Only its sequence, or a pull for it, writes it.
- NULL_BLOCK: no block, because no later token sees the tokens of block i.

Three examples of a table for 5 blocks of tokens:

    block index i        0       1       2       3       4
    full attention       stored  stored  stored  stored  own
    window               NULL    NULL    stored  stored  own     the window starts in block 2
    KV budget            own     NULL    NULL    own     own     all tokens see block 0, the sinks

In a state group (layout/kv_groups.py), the table of a sequence has one entry: the slot of its
running state, which is its own. A second entry is the slot of a frozen state that is transferred
with the blocks (`BlockTables.checkpoint`). The table of a chain has the frozen state after the
chain's last block, as in a group with a window of one block:

    state, sequence      own
    state, transferred   own     stored or own
    state, chain         NULL    NULL    NULL    NULL    stored
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tandem.errors import InternalError

if TYPE_CHECKING:
    from tandem.engine.cache.heavy_hitters import HeavyHitters
    from tandem.engine.cache.layout.kv_groups import KvLayout

NULL_BLOCK = -1


class UnfilledBlocks(NamedTuple):
    """The blocks of one KV group in a table whose KV is not yet in the pool."""

    group: int
    chain_indices: Sequence[int]  # in ascending order
    block_ids: Sequence[int]  # their ids in the pool of `group`


@dataclass(slots=True)
class BlockTables:
    """The block tables of one sequence or chain: `ids[g][i]` is the id, in the pool of group g, of
    the block with index i.

    In group g, the entries with indices `kept[g]` to `firsts[g]` - 1 are NULL_BLOCK. No kernel
    reads them. In the example with a KV budget above, `kept[g]` is 1 and `firsts[g]` is 3.
    """

    ids: list[list[int]] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    # The numbers of the state groups, if the tables are those of a sequence.
    states: tuple[int, ...] = ()
    # Number of blocks after which the frozen states are transferred, too. Their slots are the
    # second entries of the state groups' tables. 0: no frozen state is transferred.
    checkpoint: int = 0
    # Set if the sequence has a KV budget that works like a sliding window: the layout with this
    # window (`KvLayout.under`).
    budget: KvLayout | None = None
    # Set if the sequence has a KV budget that keeps heavy hitters. The table then lists the kept
    # blocks without gaps, so a block's position in the table is not its index in the sequence.
    hitters: HeavyHitters | None = None

    def __bool__(self) -> bool:
        return bool(self.ids)

    @property
    def num_evicted_tokens(self) -> int:
        """Number of computed tokens whose KV was evicted under a budget with heavy hitters. The
        tables do not list the blocks of these tokens any more."""
        return 0 if self.hitters is None else self.hitters.num_evicted_tokens

    def num_full(self, num_computed: int) -> int:
        """Returns how many blocks of the first group's table have KV once `num_computed` tokens of
        the sequence are computed. The last of these blocks may be partly filled."""
        return len(self.ids[0]) if self.hitters is None else self.hitters.num_blocks(num_computed)

    def evict(self, num_computed: int) -> None:
        """Evicts blocks if the KV budget keeps heavy hitters and `num_computed` is an eviction
        point. May only be called between steps."""
        if self.hitters is not None:
            self.hitters.evict(self.ids[0], num_computed)

    def block_sums(self, num_computed: int) -> list[float]:
        """Returns the sum of attention weights of each block. A peer needs the sums to continue the
        sequence. Returns an empty list without heavy hitters."""
        if self.hitters is None:
            return []
        sums: list[float] = self.hitters.sums(num_computed - self.num_evicted_tokens).tolist()
        return sums

    def set_sums(self, num_computed: int, sums: list[float]) -> None:
        """Sets the attention sums to those that a peer's `block_sums` returned. Raises
        InternalError if there is not one sum for each block."""
        if self.hitters is not None:
            self.hitters.set_sums(num_computed, sums)

    def copy_target(self, group: int, index: int) -> int:
        """Returns the block into which the KV is copied with which a sequence continues: the block
        at `index`, or the running state."""
        return self.ids[group][0 if group in self.states else index]

    def held(self, group: int, first: int = 0) -> list[int]:
        """Returns the ids of the blocks that a group's table references, from index `first` on. A
        running state is always among them."""
        ids = self.ids[group]
        if group in self.states:
            return ids
        kept = ids[first : self.kept[group]] if self.kept else []
        return kept + ids[max(first, self.firsts[group]) :]


def check_own(sequence_id: str, own: Collection[int], unsafe: Collection[int]) -> None:
    """Raises InternalError if a block in `unsafe` is not one of the sequence's `own` blocks."""
    if strangers := set(unsafe).difference(own):
        raise InternalError(
            f"a pull may still write to blocks {sorted(strangers)}, but these blocks do not belong "
            f"to sequence {sequence_id}"
        )


def check_trusted(sequence_id: str, num_blocks: int, num_stored: int, num_held: int) -> None:
    """Checks the result of a pull: the caller reports that the first `num_blocks` of a sequence's
    `num_held` blocks have correct KV.

    Raises InternalError if `num_blocks` is larger than `num_held`, or smaller than `num_stored`,
    the number of blocks that had KV before the pull.
    """
    if not num_stored <= num_blocks <= num_held:
        raise InternalError(
            f"{num_blocks} blocks of sequence {sequence_id} are reported as valid after the pull; "
            f"the number must be from {num_stored} (valid before the pull) to {num_held} (all "
            "blocks of the sequence)"
        )

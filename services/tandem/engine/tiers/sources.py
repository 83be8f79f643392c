"""Finds out which tier gives each missing block of a chain, and how deep a chain can be loaded.

    group without a window   [ in the pool | the first tier's | the second tier's ]
    group with a window                                [ pool | 2nd | pool | 1st  ]   any of them

The rule of a hit is the pools' own (`KvLayout.deepest_hit`); a block may be in the pool or in any
of the tiers. It knows no threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.common.perf_model.soonest import TierReach
from tandem.engine.cache.block_table import UnfilledBlock
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.cache.pool.block_pool import BlockPool
from tandem.engine.tiers.jobs import Part
from tandem.engine.tiers.tier import Tier

Tables = dict[tuple[int, int], list[int]]


class Sources:
    def __init__(self, layout: KvLayout, pools: Sequence[BlockPool], tiers: Sequence[Tier]) -> None:
        """`pools` are those of the layout's groups; the fastest tier comes first."""
        self._layout = layout
        self._pools = pools
        self._tiers = tiers
        sizes = [group.layout.block_bytes for group in layout.groups]
        self.shares = [size / sum(sizes) for size in sizes]  # of a block of all groups

    def reach(
        self, block_hashes: Sequence[bytes], held: int, tiers: Sequence[Tier]
    ) -> list[TierReach]:
        """Returns the depth up to which a chain can be loaded from the first tier, from the first
        two of them and so on, as far as they are in `tiers`, and the price of one of its blocks
        after `held`; 0 before a load was measured."""
        if not self._layout.has_windows:
            return [
                TierReach(tier.depth(block_hashes) if tier in tiers else 0, tier.rate.block_s)
                for tier in self._tiers
            ]
        usable: list[Tier] = []
        found = []
        for tier in self._tiers:
            if tier in tiers and tier.is_ready:
                usable.append(tier)
            depth = self.depth(block_hashes, usable)
            seconds = self._seconds(block_hashes, depth, usable) if depth > held else 0.0
            found.append(TierReach(depth, seconds / max(1, depth - held)))
        return found

    def find_parts(
        self, block_hashes: Sequence[bytes], wanted: Sequence[UnfilledBlock], tiers: Sequence[Tier]
    ) -> tuple[list[Part], Tables]:
        """Returns where blocks of a chain come from, the fastest tier's first, and the slots that
        are referenced now. Each of them is in a tier; others than `tiers` give what these lack."""
        parts: list[Part] = []
        tables: Tables = {}
        numbers = range(len(self._layout.groups))
        rest = [[block for block in wanted if block.group == number] for number in numbers]
        for tier in sorted(self._tiers, key=lambda tier: tier not in tiers):
            for number in numbers:
                here, rest[number] = self._divide(tier, number, block_hashes, rest[number])
                if here:
                    table = self._hold(tier, number, block_hashes, here)
                    tables[tier.number, number] = table
                    parts += _parts(tier, number, block_hashes, here, table[-len(here) :])
        assert not any(rest), "no tier has these blocks"
        return parts, tables

    def _divide(
        self,
        tier: Tier,
        group: int,
        block_hashes: Sequence[bytes],
        wanted: Sequence[UnfilledBlock],
    ) -> tuple[list[UnfilledBlock], list[UnfilledBlock]]:
        """Returns those of a group's wanted blocks that a tier has, and the others."""
        slots = tier.groups[group].pool
        here: list[UnfilledBlock] = []
        others: list[UnfilledBlock] = []
        if self._layout.groups[group].window is None:
            depth = slots.depth(block_hashes)
            for block in wanted:
                (here if block.chain_index < depth else others).append(block)
        else:
            for block in wanted:
                is_here = slots.has(block_hashes[block.chain_index])
                (here if is_here else others).append(block)
        return here, others

    def _hold(
        self,
        tier: Tier,
        group: int,
        block_hashes: Sequence[bytes],
        wanted: Sequence[UnfilledBlock],
    ) -> list[int]:
        """References the slots of blocks that a tier has. The last slots of the table are those of
        the blocks; without a window all before them in the chain come first."""
        if self._layout.groups[group].window is None:
            chain = block_hashes[: wanted[-1].chain_index + 1]
        else:
            chain = [block_hashes[block.chain_index] for block in wanted]
        return tier.groups[group].pool.hold(chain)

    def depth(self, block_hashes: Sequence[bytes], tiers: Sequence[Tier]) -> int:
        """Returns how many first blocks of a chain come from the pools or from these tiers."""
        has_full = self._layout.groups[0].window is None
        depth = self.known_depth(block_hashes, tiers) if has_full else len(block_hashes)
        return self._layout.deepest_hit(
            block_hashes,
            depth,
            lambda number, block_hash: (
                self._pools[number].find(block_hash) is not None
                or any(tier.groups[number].pool.has(block_hash) for tier in tiers)
            ),
        )

    def known_depth(
        self, block_hashes: Sequence[bytes], among: Sequence[Tier] | None = None
    ) -> int:
        """Returns how many first blocks of a chain the group without a window has in its pool or in
        tiers, by default in any; 0 if all groups have a window."""
        if self._layout.groups[0].window is not None:
            return 0
        tiers = self._tiers if among is None else among
        reached = [tier.pool.depth(block_hashes) for tier in tiers]
        return max(len(self._pools[0].match(block_hashes)), *reached, 0)

    def _seconds(self, block_hashes: Sequence[bytes], depth: int, tiers: Sequence[Tier]) -> float:
        """Returns the time to load what the pools lack of a chain's first `depth` blocks."""
        seconds = 0.0
        for number, group in enumerate(self._layout.groups):
            first = group.first_seen(depth * self._layout.block_size)
            for block_hash in block_hashes[first:depth]:
                if self._pools[number].find(block_hash) is None:
                    tier = next(t for t in tiers if t.groups[number].pool.has(block_hash))
                    seconds += self.shares[number] * tier.rate.block_s
        return seconds


def _parts(
    tier: Tier,
    group: int,
    block_hashes: Sequence[bytes],
    wanted: Sequence[UnfilledBlock],
    slots: Sequence[int],
) -> list[Part]:
    """Returns the parts of a load that fill a group's blocks from these slots of a tier."""
    storage = tier.groups[group].storage
    return [
        Part(tier.number, storage, slot, block_hashes[index], block_id, index, group)
        for slot, (_, index, block_id) in zip(slots, wanted, strict=True)
    ]

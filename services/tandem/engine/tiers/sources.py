"""Finds the tier from which each missing block of a chain can be loaded, and the depth to which a
chain can be loaded.

The chains below are drawn from the first block to the last. In a window, the blocks of the pool and
of the tiers may be in any order:

    group without a window   [ in the pool | in the first tier | in the second tier         ]
    group with a window      [ not needed               | pool | 2nd tier | pool | 1st tier ]

The depth is the largest one at which a request can resume (`KvLayout.deepest_hit`) with the blocks
of the pool and of all tiers together. This module starts no threads and reads no bytes of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.common.perf_model.soonest import TierReach
from tandem.engine.cache.block_table import UnfilledBlock
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.cache.pool.block_pool import BlockPool
from tandem.engine.tiers.jobs import LoadPart
from tandem.engine.tiers.tier import Tier

Tables = dict[tuple[int, int], list[int]]


class Sources:
    def __init__(self, layout: KvLayout, pools: Sequence[BlockPool], tiers: Sequence[Tier]) -> None:
        """`pools` has the pool of each group. `tiers` are ordered from the fastest to the
        slowest."""
        self._layout = layout
        self._pools = pools
        self._tiers = tiers
        sizes = [group.layout.block_bytes for group in layout.groups]
        # For each group, its block size as a fraction of the sum of all groups' block sizes.
        self.shares = [size / sum(sizes) for size in sizes]

    def reach(
        self, block_hashes: Sequence[bytes], held: int, tiers: Sequence[Tier]
    ) -> list[TierReach]:
        """Returns, for each tier, the depth to which a chain can be loaded from this tier and the
        faster ones, and the seconds per block.

        Only tiers in `tiers` are used. The seconds are an average over the blocks after the first
        `held` blocks, which the pool has. They are 0 if no load was measured.
        """
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
    ) -> tuple[list[LoadPart], Tables]:
        """Returns the parts of a load (one read for each wanted block), the fastest tier first, and
        the slots that are now referenced for these reads.

        Each wanted block must be in a tier. A tier that is not in `tiers` provides only the blocks
        that no tier in `tiers` has.
        """
        parts: list[LoadPart] = []
        tables: Tables = {}
        numbers = range(len(self._layout.groups))
        rest = [[block for block in wanted if block.group == number] for number in numbers]
        for tier in sorted(self._tiers, key=lambda tier: tier not in tiers):
            for number in numbers:
                found, rest[number] = self._divide(tier, number, block_hashes, rest[number])
                if found:
                    table = self._hold(tier, number, block_hashes, found)
                    tables[tier.number, number] = table
                    parts += _parts(tier, number, block_hashes, found, table[-len(found) :])
        assert not any(rest), "no tier has these blocks"
        return parts, tables

    def _divide(
        self,
        tier: Tier,
        group: int,
        block_hashes: Sequence[bytes],
        wanted: Sequence[UnfilledBlock],
    ) -> tuple[list[UnfilledBlock], list[UnfilledBlock]]:
        """Divides a group's wanted blocks into (those that the tier has, the others)."""
        slots = tier.groups[group].pool
        found: list[UnfilledBlock] = []
        others: list[UnfilledBlock] = []
        if self._layout.groups[group].window is None:
            depth = slots.depth(block_hashes)
            for block in wanted:
                (found if block.chain_index < depth else others).append(block)
        else:
            for block in wanted:
                is_found = slots.has(block_hashes[block.chain_index])
                (found if is_found else others).append(block)
        return found, others

    def _hold(
        self,
        tier: Tier,
        group: int,
        block_hashes: Sequence[bytes],
        wanted: Sequence[UnfilledBlock],
    ) -> list[int]:
        """References the slots that hold the wanted blocks and returns them. Without a window, the
        slots of all earlier blocks of the chain are referenced too and come first."""
        if self._layout.groups[group].window is None:
            chain = block_hashes[: wanted[-1].chain_index + 1]
        else:
            chain = [block_hashes[block.chain_index] for block in wanted]
        return tier.groups[group].pool.hold(chain)

    def depth(self, block_hashes: Sequence[bytes], tiers: Sequence[Tier]) -> int:
        """Returns the largest depth at which a request can resume with the blocks of a chain that
        the pools and these tiers have together."""
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
        """Returns how many leading blocks of a chain the full-attention group has in its pool or in
        one of the tiers `among`.

        `among` defaults to all tiers. Returns 0 if all groups have a window.
        """
        if self._layout.groups[0].window is not None:
            return 0
        tiers = self._tiers if among is None else among
        reached = [tier.pool.depth(block_hashes) for tier in tiers]
        return max(len(self._pools[0].match(block_hashes)), *reached, 0)

    def _seconds(self, block_hashes: Sequence[bytes], depth: int, tiers: Sequence[Tier]) -> float:
        """Returns the expected seconds to load the blocks that a request needs to resume after the
        first `depth` blocks of a chain. Blocks in the pools need no load."""
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
) -> list[LoadPart]:
    """Returns the parts of a load that read these slots of a tier into the wanted blocks."""
    storage = tier.groups[group].storage
    return [
        LoadPart(tier.number, storage, slot, block_hashes[index], block_id, index, group)
        for slot, (_, index, block_id) in zip(slots, wanted, strict=True)
    ]

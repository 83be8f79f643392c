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

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from itertools import repeat

from tandem.common.perf_model.soonest import TierReach
from tandem.engine.cache.block_table import UnfilledBlocks
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
        self, block_hashes: Sequence[bytes], wanted: Sequence[UnfilledBlocks], tiers: Sequence[Tier]
    ) -> tuple[list[LoadPart], Tables]:
        """Returns the parts of a load (one read for each wanted block), the fastest tier first, and
        the slots that are now referenced for these reads.

        Each wanted block must be in a tier. A tier that is not in `tiers` provides only the blocks
        that no tier in `tiers` has.
        """
        parts: list[LoadPart] = []
        tables: Tables = {}
        rest = list(wanted)
        for tier in sorted(self._tiers, key=lambda tier: tier not in tiers):
            left = []
            for blocks in rest:
                found, others = self._divide(tier, block_hashes, blocks)
                if found.block_ids:
                    table = self._hold(tier, block_hashes, found)
                    tables[tier.number, blocks.group] = table
                    parts += _parts(tier, block_hashes, found, table[-len(found.block_ids) :])
                if others.block_ids:
                    left.append(others)
            rest = left
        assert not rest, "no tier has these blocks"
        return parts, tables

    def share_of(self, parts: Sequence[LoadPart]) -> float:
        """Returns the average block size of these parts, as a fraction of the sum of all groups'
        block sizes."""
        if len(self.shares) == 1:
            return 1.0
        return sum(self.shares[part.group] for part in parts) / len(parts)

    def _divide(
        self, tier: Tier, block_hashes: Sequence[bytes], wanted: UnfilledBlocks
    ) -> tuple[UnfilledBlocks, UnfilledBlocks]:
        """Divides a group's wanted blocks into (those that the tier has, the others)."""
        group, indices, block_ids = wanted
        slots = tier.groups[group].pool
        if self._layout.groups[group].window is None:
            num_found = bisect_left(indices, slots.depth(block_hashes))
            return (
                UnfilledBlocks(group, indices[:num_found], block_ids[:num_found]),
                UnfilledBlocks(group, indices[num_found:], block_ids[num_found:]),
            )
        has = [slots.has(block_hashes[index]) for index in indices]
        found, others = (
            UnfilledBlocks(
                group,
                [index for index, each in zip(indices, has, strict=True) if each is is_found],
                [block for block, each in zip(block_ids, has, strict=True) if each is is_found],
            )
            for is_found in (True, False)
        )
        return found, others

    def _hold(self, tier: Tier, block_hashes: Sequence[bytes], wanted: UnfilledBlocks) -> list[int]:
        """References the slots that hold the wanted blocks and returns them. Without a window, the
        slots of all earlier blocks of the chain are referenced too and come first."""
        indices = wanted.chain_indices
        if self._layout.groups[wanted.group].window is None:
            chain = block_hashes[: indices[-1] + 1]
        else:
            chain = [block_hashes[index] for index in indices]
        return tier.groups[wanted.group].pool.hold(chain)

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
    tier: Tier, block_hashes: Sequence[bytes], wanted: UnfilledBlocks, slots: Sequence[int]
) -> list[LoadPart]:
    """Returns the parts of a load that read these slots of a tier into the wanted blocks."""
    group, indices, block_ids = wanted
    hashes = [block_hashes[index] for index in indices]
    storage = tier.groups[group].storage
    rows = zip(
        repeat(tier.number), repeat(storage), slots, hashes, block_ids, indices, repeat(group)
    )
    # The engine's thread waits for this, and a call of LoadPart for each block takes longer.
    return list(map(partial(tuple.__new__, LoadPart), rows))

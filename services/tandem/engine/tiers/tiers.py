"""Manages the tiers below the KV pool (host memory, disk, object store): decides which blocks are
written to them, and which are loaded from them.

    hashed block of the pool   without a copy --Write--> with a copy --evict--> FREE
    sequence                   WAITING --admit--> LOADING --Load--> RUNNING, or WAITING_FOR_KV

The engine's thread makes all decisions and updates all state, in `settle`, `write` and when a load
ends. Each tier has two threads that move bytes, one in each direction, so a tier that hangs does
not block another. The blocks of a chain are written from the first to the last, and a tier evicts
leaves first, so each tier holds complete prefixes. If a load fails or stalls, the engine computes
the blocks, and the tokens are the same.

A model with sliding windows has a pool for each KV group, and a tier has slots for each group. A
load then brings all blocks that a sequence needs to resume at one depth, or none, because a window
needs different blocks at different depths.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue

from tandem.common.perf_model.rates import PrefillRate
from tandem.common.perf_model.soonest import TierReach, load_seconds
from tandem.engine.cache.block_table import UnfilledBlocks
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.cache.pool.block import Copy
from tandem.engine.cache.pool.block_pool import BlockPool
from tandem.engine.tiers.device.blocks import DeviceBlocks
from tandem.engine.tiers.io_thread import IoThread, JobThread
from tandem.engine.tiers.jobs import Load, LoadPart
from tandem.engine.tiers.object_store.lookups import Lookups
from tandem.engine.tiers.sources import Sources
from tandem.engine.tiers.tier import Tier, is_held
from tandem.engine.tiers.writes import PoolGroup, Writes
from tandem.engine.types import TierBlocks, TierStats

STALL_S = 2.0  # a load that gets no block for this many seconds is cancelled
TURN_S = 8e-5  # seconds that a step of the engine spends on finished writes, or on new writes
# Number of steps in a row that put off new writes because of a load. A load from host memory starts
# in one step and often ends in the next one.
_WAITS_MAX = 2
_CLOSE_S = 3.0  # time limit in seconds for the last writes when the engine closes


class Tiers:
    def __init__(
        self,
        pools: Sequence[BlockPool],
        layout: KvLayout,
        blocks: Sequence[DeviceBlocks],
        tiers: Sequence[Tier],
        start_thread: Callable[[str], JobThread] = IoThread,
        *,
        unquarantine: Callable[[list[int]], object],
    ) -> None:
        """`blocks` has one item for each KV group: the blocks of the group's pool. `tiers` are
        ordered from the fastest to the slowest. `unquarantine` frees quarantined blocks, by their
        ids among all pools (`KvCache.unquarantine`)."""
        self.tiers = tiers
        self._unquarantine = unquarantine
        self._writers = [start_thread(f"{tier.storage.name}-writes") for tier in tiers]
        self._readers = [start_thread(f"{tier.storage.name}-loads") for tier in tiers]
        self._groups = [
            PoolGroup(
                number,
                pool,
                of_group,
                [of_group.open_channel() for _ in tiers],
                [of_group.open_channel() for _ in tiers],
            )
            for number, (pool, of_group) in enumerate(zip(pools, blocks, strict=True))
        ]
        self._layout = layout
        self._sources = Sources(layout, pools, tiers)
        self._ended: SimpleQueue[Load] = SimpleQueue()
        self._loads: dict[str, Load] = {}  # loads in flight, by sequence id
        self._cancelled: list[Load] = []  # cancelled loads that have not ended yet
        self._settles = False  # True: this step handles finished writes
        # True: this step starts a load, or handles one that has ended.
        self._handles_load = False
        # True: finished writes were handled after the last start of new writes.
        self._has_settled = False
        self._num_waited = 0  # number of steps in a row that put off new writes because of a load
        # Uses of blocks that were not passed to the policies yet. Each item has (block hashes,
        # whether to keep the blocks, priority).
        self._uses: list[tuple[Sequence[bytes], bool, int]] = []
        self.clock = time.monotonic
        self._writes = Writes(self._groups, tiers, self._writers, lambda: self.clock())
        self.turn_s = TURN_S
        # For each tier, the last time at which a load ended there or moved to the next tier.
        self._progress_at = [0.0] * len(tiers)
        self.lookups = Lookups(tiers, start_thread, self.clock, layout, self._depth)

    @property
    def has_results(self) -> bool:
        """True if the engine's next step has work for the tiers: results to handle, events to
        report, writes to start, or stalled loads to cancel."""
        has_ended = not self._ended.empty() or self.lookups.has_ended or self._writes.have_ended
        has_events = any(tier.has_events for tier in self.tiers)
        return has_ended or has_events or self._writes.are_wanted or bool(self.find_stalled())

    @property
    def is_busy(self) -> bool:
        """True while threads of the tiers work. When they finish, `has_results` may become True."""
        is_reading = self._loads or any(not self._is_stalled(load) for load in self._cancelled)
        return bool(is_reading or self._writes.are_under_way or self.lookups.is_busy)

    @property
    def num_loads(self) -> int:
        """Number of loads in flight, without cancelled ones."""
        return len(self._loads)

    @property
    def num_fenced(self) -> int:
        """Number of quarantined blocks that cancelled loads may still write."""
        return sum(len(load.unsafe_parts) for load in self._cancelled)

    def settle(self) -> None:
        """Handles the results of look-ups and of writes, for about `turn_s` seconds."""
        until = time.perf_counter() + self.turn_s
        if self.lookups.has_ended:
            self.lookups.settle(until)
            self._follow_evictions()
        self._follow_losses()
        waits = self._has_settled and self._writes.are_wanted
        self._settles = self._writes.have_ended and not waits
        if self._settles:
            self._has_settled = True
            self._writes.settle(until)

    def write(self) -> None:
        """Passes uses to the policies and starts new writes, for about `turn_s` seconds.

        Where possible, a step does only one of three things: it starts writes (here), handles
        finished writes (in `settle`), or starts a load or handles one that has ended. After a step
        of the model, the processor's caches hold neither code nor data for these tasks. So the
        first block of each task takes many times as long as the next ones.
        """
        waits = self._settles or (self._handles_load and self._num_waited < _WAITS_MAX)
        self._num_waited += self._handles_load
        self._handles_load = False
        if waits or not self.tiers:
            return
        until = time.perf_counter() + self.turn_s
        self._num_waited = 0
        self._count_uses()
        if self._writes.are_wanted:
            self._has_settled = False
            self._writes.start(until)
            self._follow_evictions()

    def take_rate(self, rate: PrefillRate) -> None:
        """Passes the measured prefill rate to the tiers' policies, one of which values blocks by
        their compute time."""
        for tier in self.tiers:
            tier.take_rate(rate)

    def use(self, block_hashes: Sequence[bytes], *, keep: bool, priority: int) -> None:
        """Records that a sequence computed or reused these blocks. `keep`: True if the blocks are
        likely to be needed again.

        The policies count the uses before the next writes start, because some accept only blocks
        that are used often.
        """
        if self.tiers:
            self._uses.append((block_hashes, keep, priority))

    def reach(self, block_hashes: Sequence[bytes], held: int = 0) -> list[TierReach]:
        """Returns, for each tier, how many leading blocks of a chain can be loaded from this tier
        and the faster ones, and the seconds per block. The seconds are an average over the blocks
        after the first `held` blocks, which the pool has. They are 0 if no load was measured."""
        return self._sources.reach(block_hashes, held, self._readable)

    def known_depth(self, block_hashes: Sequence[bytes]) -> int:
        """Returns how many leading blocks of a chain the full-attention group has in its pool or in
        a tier."""
        return self._sources.known_depth(block_hashes)

    def decline(self) -> None:
        """Records that blocks were computed or pulled instead of loaded, because this was expected
        to be faster."""
        for tier in self.tiers:
            tier.rate.decline()

    def load(
        self,
        sequence_id: str,
        block_hashes: Sequence[bytes],
        wanted: Sequence[UnfilledBlocks],
        *,
        num_spared: int = 0,
    ) -> None:
        """Starts a load of the `wanted` blocks of a chain. Each of them must be in a tier.

        The engine is expected to compute the first `num_spared` of these blocks during the load
        (`Load.take`). `num_spared` must be 0 if there are several groups.
        """
        parts, tables = self._sources.find_parts(block_hashes, wanted, self._readable)
        load = Load(
            sequence_id=sequence_id,
            chain=block_hashes,
            parts=parts,
            tables=tables,
            share=self._sources.share_of(parts),
            num_spared=num_spared,
            channels=[group.channels_in for group in self._groups],
            after=self._groups[0].blocks.mark(),
            clock=self.clock,
            on_end=self._ended.put,
            continue_in=self._continue_in,
        )
        self._loads[sequence_id] = load
        self._handles_load = True
        self._readers[load.tier].submit(load)

    def reach_of(self, load: Load) -> list[TierReach]:
        """Returns, for each tier of a load, the chain index up to which the tier provides blocks,
        and the expected seconds per block."""
        return [
            TierReach(load.first_block + end, load.share * self.tiers[number].rate.block_s)
            for number, end in load.ends.items()
        ]

    def take_ended(self) -> list[Load]:
        """Returns the loads that ended since the last call, without cancelled ones. No thread
        writes to the blocks of ended loads any more."""
        ended = []
        while not self._ended.empty():
            load = self._ended.get_nowait()
            self._handles_load = True
            self._progress_at[load.tier] = self.clock()
            for (tier, group), table in load.tables.items():
                self.tiers[tier].groups[group].pool.release(table)
            self._observe(load)
            if load.is_cancelled:
                self._cancelled.remove(load)
                self._unquarantine(self._unsafe_ids(load))
            else:
                del self._loads[load.sequence_id]
                ended.append(load)
        return ended

    def cancel_load(self, sequence_id: str) -> list[int]:
        """Cancels a sequence's load, if it has one. Returns the ids of the blocks that the load may
        still write."""
        self.lookups.forget(sequence_id)
        load = self._loads.pop(sequence_id, None)
        if load is None:
            return []
        load.is_cancelled = True
        self._cancelled.append(load)
        return self._unsafe_ids(load)

    def _unsafe_ids(self, load: Load) -> list[int]:
        """Returns the ids, among all pools, of the blocks that a load may still write."""
        return [
            block_id
            for part in load.unsafe_parts
            for block_id in self._layout.global_ids(part.group, [part.block_id])
        ]

    def find_load(self, sequence_id: str) -> Load:
        """Returns the load of a LOADING sequence."""
        return self._loads[sequence_id]

    def is_loading(self, block_hashes: Sequence[bytes], depth: int) -> bool:
        """Returns whether a load in flight brings blocks with which a chain is reusable beyond its
        first `depth` blocks, which the pools have.

        With sliding windows or states, a load brings what is needed after its last block alone.
        """
        if self._layout.has_windows:
            ends = (len(load.chain) for load in self._loads.values())
            return any(
                depth < end <= len(block_hashes) and block_hashes[end - 1] == load.chain[-1]
                for end, load in zip(ends, self._loads.values(), strict=True)
            )
        return depth < len(block_hashes) and any(
            depth < len(load.chain) and block_hashes[depth] == load.chain[depth]
            for load in self._loads.values()
        )

    def find_stalled(self) -> list[str]:
        """Returns the ids of sequences whose loads have stalled."""
        return [name for name, load in self._loads.items() if self._is_stalled(load)]

    def reset(self) -> None:
        """Drops all copies of blocks. A copy that is being written is dropped when its write
        ends."""
        self._writes.forget()
        for tier in self.tiers:
            for group in tier.groups:
                group.pool.drop_cached()
                self._writers[tier.number].submit(group.storage.forget)
        self._follow_evictions()

    @property
    def queued_s(self) -> float:
        """Expected seconds until all loads in flight have ended."""
        return sum(
            load_seconds(self.reach_of(load), load.first_expected, load.blocks.start)
            for load in self._loads.values()
        )

    def take_events(self) -> list[TierBlocks]:
        """Returns the changes of each tier since the last call. Tiers without changes are left
        out."""
        return [tier.take_events() for tier in self.tiers if tier.has_events]

    def block_hashes(self, name: str, first: bytes, end: bytes) -> list[bytes]:
        """Returns the hashes h with `first` <= h < `end` of the blocks that the tier `name` can
        load; an empty `end` means no upper bound."""
        tier = next((tier for tier in self.tiers if tier.storage.name == name), None)
        return [] if tier is None else tier.block_hashes(first, end)

    def stats(self) -> list[TierStats]:
        return [tier.stats() for tier in self.tiers]

    def close(self) -> None:
        """Writes blocks without a copy, for at most `_CLOSE_S` seconds, and ends the threads."""
        if not self.tiers:
            return
        until = self.clock() + _CLOSE_S
        while self.clock() < until and (self._writes.are_wanted or self._writes.are_under_way):
            self.settle()
            self.write()
            time.sleep(1e-3)
        for writer in self._writers:
            writer.close(max(0.0, until - self.clock()))
        for reader in self._readers:
            reader.close(0.0)
        self.lookups.close()
        for tier in self.tiers:
            for group in tier.groups:
                group.storage.close()

    @property
    def _readable(self) -> list[Tier]:
        """The tiers that are ready and whose reader thread is not blocked by a stalled load."""
        stalled = {load.tier for load in self._cancelled if self._is_stalled(load)}
        return [tier for tier in self.tiers if tier.is_ready and tier.number not in stalled]

    def _depth(self, block_hashes: Sequence[bytes]) -> int:
        return self._sources.depth(block_hashes, self._readable)

    def _continue_in(self, tier: int, load: Load) -> None:
        """Continues a load in the thread of `tier`, the next tier to read from. Called in the
        thread of the tier from which the load has just read its blocks."""
        load.submitted_at = self._progress_at[load.tier] = self.clock()
        load.progress_at = 0.0
        load.tier = tier
        self._readers[tier].submit(load)

    def _count_uses(self) -> None:
        for block_hashes, keep, priority in self._uses:
            for tier in self.tiers:
                tier.policy.use(block_hashes, keep=keep, priority=priority)
        self._uses.clear()

    def _follow_evictions(self) -> None:
        for tier in self.tiers:
            for group, slots in zip(self._groups, tier.groups, strict=True):
                for block_hash in slots.follow_evictions():
                    if not is_held(self.tiers, group.number, block_hash):
                        group.pool.lose_copy(block_hash)

    def _observe(self, load: Load) -> None:
        for tier in self.tiers:
            parts = [part for part in load.parts_read if part.tier == tier.number]
            if parts:
                tier.num_loaded += len(parts)
                num_blocks = len(parts) * self._sources.share_of(parts)
                tier.rate.observe(num_blocks, load.seconds[tier.number])
        if load.failed is not None:
            self._drop_chain(load, load.failed)

    def _drop_chain(self, load: Load, failed: LoadPart) -> None:
        """Handles a block that could not be read. Marks the tier's copies of this block and of all
        earlier blocks in the chain as bad, except the copies that this load has read.

        Damage often affects several blocks, and each unreadable block would end another load. A bad
        copy is written again when its block is computed. If the tier is not ready, only the block
        that could not be read is marked, because the error says nothing about other blocks.
        """
        tier = self.tiers[failed.tier]
        tier.num_bad += 1
        read = {
            (part.group, part.block_hash) for part in load.parts_read if part.tier == tier.number
        }
        chain = load.chain[: failed.chain_index + 1]
        for number in range(len(tier.groups)) if tier.is_ready else ():
            for block_hash in chain:
                if (number, block_hash) not in read:
                    self._mark_bad(tier, number, block_hash)
        self._mark_bad(tier, failed.group, failed.block_hash)
        self._follow_losses()

    def _follow_losses(self) -> None:
        for tier in self.tiers:
            for number, group in enumerate(tier.groups):
                for block_hash in group.take_lost():
                    tier.num_bad += 1
                    self._mark_bad(tier, number, block_hash)

    def _mark_bad(self, tier: Tier, group: int, block_hash: bytes) -> None:
        tier.mark_bad(group, block_hash)
        if not is_held(self.tiers, group, block_hash):
            self._groups[group].pool.renew_copy(block_hash)

    def _is_stalled(self, load: Load) -> bool:
        in_flight: Iterable[Load] = (*self._loads.values(), *self._cancelled)
        of_tier = (each.progress_at for each in in_flight if each.tier == load.tier)
        last = max(*of_tier, self._progress_at[load.tier], load.submitted_at)
        return self.clock() - last > STALL_S

    def check_integrity(self) -> None:
        """Raises AssertionError if the slots of a tier are inconsistent, or do not match the pool's
        record of copies."""
        loads = [*self._loads.values(), *self._cancelled]
        for group in self._groups:
            for tier in self.tiers:
                place = tier.number, group.number
                tables = [load.tables[place] for load in loads if place in load.tables]
                tables += [
                    target.table
                    for write in group.writes.values()
                    for target in write.targets
                    if target.tier == tier.number and not target.is_settled
                ]
                tier.groups[group.number].pool.check_integrity(tables)
            for block_id, block_hash, copy in group.pool.copies():
                assert (copy is Copy.WRITING) == (block_id in group.writes), f"{block_id} is {copy}"
                held = copy is not Copy.COMPLETE or (
                    block_hash is not None and is_held(self.tiers, group.number, block_hash)
                )
                assert held, f"no tier holds the copy of block {block_id}"

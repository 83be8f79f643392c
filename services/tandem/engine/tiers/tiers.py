"""The tiers below the device's KV pool: what is written to them, and what comes back.

    device block   CACHED, one of the oldest --Write--> CACHED with a copy --evict--> FREE
    sequence       WAITING --admit--> LOADING --Load--> RUNNING, or WAITING_FOR_KV

The engine's thread decides and keeps the books, in `turn`, `write` and when a load ends. Two
threads move the bytes of each tier, one each way, so a tier that hangs holds up no other. A write
starts at the root of a chain and goes on to its leaf, and a tier evicts leaves first, so each tier
holds whole prefixes. A load that fails or stands still costs the time to compute its blocks. It
changes no token.

A model with sliding windows has a pool for each KV group, and a tier the slots of each. A load
brings all that a sequence needs at one depth, or nothing: a window of another depth is of no use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue

from tandem.common.perf_model.rates import PrefillRate
from tandem.common.perf_model.soonest import TierReach, load_seconds
from tandem.engine.cache.block_table import UnfilledBlock
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.cache.pool.block import Copy
from tandem.engine.cache.pool.block_pool import BlockPool
from tandem.engine.tiers.device.blocks import DeviceBlocks
from tandem.engine.tiers.io_thread import IoThread, JobThread
from tandem.engine.tiers.jobs import Load, Part
from tandem.engine.tiers.object_store.lookups import Lookups
from tandem.engine.tiers.sources import Sources
from tandem.engine.tiers.tier import Tier, is_held
from tandem.engine.tiers.writes import PoolGroup, Writes
from tandem.engine.types import TierBlocks, TierStats

STALL_S = 2.0  # a load that gets no block for so long is given up
TURN_S = 8e-5  # of the engine's thread in each step, for what was written or is to be
_CLOSE_S = 3.0  # for what is not written when the engine ends


class Tiers:
    def __init__(
        self,
        pools: Sequence[BlockPool],
        layout: KvLayout,
        blocks: Sequence[DeviceBlocks],
        tiers: Sequence[Tier],
        start_thread: Callable[[str], JobThread] = IoThread,
    ) -> None:
        """`blocks` are those of the pools of the layout's groups; the fastest tier comes first."""
        self.tiers = tiers
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
        self._first_ids = layout.first_ids
        self._sources = Sources(layout, pools, tiers)
        self._ended: SimpleQueue[Load] = SimpleQueue()
        self._loads: dict[str, Load] = {}  # in flight, by their sequence
        self._given_up: list[Load] = []  # in flight, without a sequence
        self._settles = False  # in this step
        self._starts_load = False  # in this step
        self._has_settled = False  # since writes were started last
        self._has_waited = False  # for a load, since then
        # That the policies have not counted: blocks, whether to keep them, and their priority.
        self._uses: list[tuple[Sequence[bytes], bool, int]] = []
        self.clock = time.monotonic
        self._writes = Writes(self._groups, tiers, self._writers, lambda: self.clock())
        self.turn_s = TURN_S
        self._progress_at = [0.0] * len(tiers)  # of loads that ended there, or went on elsewhere
        self.lookups = Lookups(tiers, start_thread, self.clock, layout, self._depth)

    @property
    def has_news(self) -> bool:
        """True if `turn` or the end of a load has something to do for a sequence."""
        has_ended = not self._ended.empty() or self.lookups.has_ended or self._writes.have_ended
        has_events = any(tier.has_events for tier in self.tiers)
        return has_ended or has_events or self._writes.are_wanted or bool(self.find_stalled())

    @property
    def is_busy(self) -> bool:
        """True while threads work: `has_news` may turn True then."""
        is_reading = self._loads or any(not self._is_stalled(load) for load in self._given_up)
        return bool(is_reading or self._writes.are_under_way or self.lookups.is_busy)

    @property
    def num_fenced(self) -> int:
        """Device blocks that loads without a sequence may still write; they are quarantined."""
        return sum(len(load.unsafe_parts) for load in self._given_up)

    def turn(self) -> None:
        """Takes answers of look-ups and what was written, for `turn_s` or a little longer."""
        until = time.perf_counter() + self.turn_s
        if self.lookups.has_ended:
            self.lookups.turn(until)
            self._follow_evictions()
        self._follow_losses()
        waits = self._has_settled and self._writes.are_wanted
        self._settles = self._writes.have_ended and not waits
        if self._settles:
            self._has_settled = True
            self._writes.settle(until)

    def write(self) -> None:
        """Counts uses and starts further writes, for `turn_s` or a little longer.

        A step does either this, or takes what was written, or starts a load, if it can. After a
        step of the model neither code nor data is in the processor's caches, so the first block
        takes many times as long as the next ones.
        """
        waits = self._settles or (self._starts_load and not self._has_waited)
        self._has_waited |= self._starts_load
        self._starts_load = False
        if waits or not self.tiers:
            return
        until = time.perf_counter() + self.turn_s
        self._has_waited = False
        self._count_uses()
        if self._writes.are_wanted:
            self._has_settled = False
            self._writes.start(until)
            self._follow_evictions()

    def take_rate(self, rate: PrefillRate) -> None:
        """Tells the policies the measured rate of prefill, for what blocks are worth."""
        for tier in self.tiers:
            tier.take_rate(rate)

    def use(self, block_hashes: Sequence[bytes], *, keep: bool, priority: int) -> None:
        """A sequence computed or reuses these blocks; `keep`: they are likely to return.

        It counts before the next writes, because a tier takes what was used often."""
        if self.tiers:
            self._uses.append((block_hashes, keep, priority))

    def reach(self, block_hashes: Sequence[bytes], held: int = 0) -> list[TierReach]:
        """Returns how many first blocks of a chain come from each tier, or from those before it,
        and the measured price of one after `held`; 0 before a load was measured."""
        return self._sources.reach(block_hashes, held, self._readable)

    def known_depth(self, block_hashes: Sequence[bytes]) -> int:
        """Returns how many first blocks of a chain the group without a window has anywhere."""
        return self._sources.known_depth(block_hashes)

    def decline(self) -> None:
        """A load was not made, because another way looked sooner."""
        for tier in self.tiers:
            tier.rate.decline()

    def load(
        self,
        sequence_id: str,
        block_hashes: Sequence[bytes],
        wanted: Sequence[UnfilledBlock],
        *,
        num_spared: int = 0,
    ) -> None:
        """Starts to fill blocks of a chain, those of a group in its order; tiers have them all.

        The engine is expected to compute the first `num_spared` of them meanwhile (`take`), if they
        are of one group.
        """
        parts, tables = self._sources.find_parts(block_hashes, wanted, self._readable)
        load = Load(
            sequence_id=sequence_id,
            chain=block_hashes,
            parts=parts,
            tables=tables,
            share=sum(self._sources.shares[part.group] for part in parts) / len(parts),
            num_spared=num_spared,
            channels=[group.channels_in for group in self._groups],
            after=self._groups[0].blocks.mark(),
            clock=self.clock,
            on_end=self._ended.put,
            go_on=self._go_on,
        )
        self._loads[sequence_id] = load
        self._starts_load = True
        self._readers[load.tier].submit(load)

    def reach_of(self, load: Load) -> list[TierReach]:
        """Returns where the blocks of a load come from."""
        return [
            TierReach(load.first_block + end, load.share * self.tiers[number].rate.block_s)
            for number, end in load.ends.items()
        ]

    def take_ended(self) -> list[Load]:
        """Returns the loads that ended, but those given up; their blocks are no more written."""
        ended = []
        while not self._ended.empty():
            load = self._ended.get_nowait()
            self._progress_at[load.tier] = self.clock()
            for (tier, group), table in load.tables.items():
                self.tiers[tier].groups[group].pool.release(table)
            self._observe(load)
            if load.is_given_up:
                self._given_up.remove(load)
                for part in load.unsafe_parts:
                    self._groups[part.group].pool.unquarantine([part.block_id])
            else:
                del self._loads[load.sequence_id]
                ended.append(load)
        return ended

    def give_up(self, sequence_id: str) -> list[int]:
        """Ends a load, if there is one; returns the blocks that may still be written."""
        self.lookups.forget(sequence_id)
        load = self._loads.pop(sequence_id, None)
        if load is None:
            return []
        load.is_given_up = True
        self._given_up.append(load)
        return [self._first_ids[part.group] + part.block_id for part in load.unsafe_parts]

    def find_load(self, sequence_id: str) -> Load:
        """Returns the load of a sequence that is LOADING."""
        return self._loads[sequence_id]

    def find_stalled(self) -> list[str]:
        """Returns the sequences whose loads stand still."""
        return [name for name, load in self._loads.items() if self._is_stalled(load)]

    def reset(self) -> None:
        """Forgets all copies. What is on its way to a tier is forgotten when it comes there."""
        self._writes.forget()
        for tier in self.tiers:
            for group in tier.groups:
                group.pool.drop_cached()
                self._writers[tier.number].submit(group.storage.forget)
        self._follow_evictions()

    @property
    def queued_s(self) -> float:
        """Seconds until the loads in flight have ended, as far as the tiers were measured."""
        return sum(
            load_seconds(self.reach_of(load), load.first_expected, load.blocks.start)
            for load in self._loads.values()
        )

    def take_events(self) -> list[TierBlocks]:
        """Returns the tiers whose blocks changed since the last call, with the changes."""
        return [tier.take_events() for tier in self.tiers if tier.has_events]

    def block_hashes(self, name: str, first: bytes, end: bytes) -> list[bytes]:
        """Returns hashes that a tier can give back, from `first` on and before `end`; empty `end`:
        to the last."""
        tier = next((tier for tier in self.tiers if tier.storage.name == name), None)
        return [] if tier is None else tier.block_hashes(first, end)

    def stats(self) -> list[TierStats]:
        return [tier.stats() for tier in self.tiers]

    def close(self) -> None:
        """Writes what has no copy yet, for `_CLOSE_S` at most, and ends the threads."""
        if not self.tiers:
            return
        until = self.clock() + _CLOSE_S
        while self.clock() < until and (self._writes.are_wanted or self._writes.are_under_way):
            self.turn()
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
        """The tiers that are ready, but those whose load stands still: their thread would come to
        no other one."""
        stalled = {load.tier for load in self._given_up if self._is_stalled(load)}
        return [tier for tier in self.tiers if tier.is_ready and tier.number not in stalled]

    def _depth(self, block_hashes: Sequence[bytes]) -> int:
        return self._sources.depth(block_hashes, self._readable)

    def _go_on(self, tier: int, load: Load) -> None:
        """Lets a load go on in the thread of a tier; called in the thread that it leaves."""
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
            groups = [part.group for part in load.parts_read if part.tier == tier.number]
            if groups:
                tier.num_loaded += len(groups)
                num_blocks = sum(self._sources.shares[group] for group in groups)
                tier.rate.observe(num_blocks, load.seconds[tier.number])
        if load.failed is not None:
            self._drop_chain(load, load.failed)

    def _drop_chain(self, load: Load, failed: Part) -> None:
        """A block could not be read. What damaged it has often damaged others, and each of them
        would end a later load. So all that its tier has of the prompt up to there counts as bad,
        except for what was just read, and is written anew when it is computed. If the tier itself
        is not ready, only the block counts as bad: the error says nothing of the others.
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
        in_flight: Iterable[Load] = (*self._loads.values(), *self._given_up)
        of_tier = (each.progress_at for each in in_flight if each.tier == load.tier)
        last = max(*of_tier, self._progress_at[load.tier], load.submitted_at)
        return self.clock() - last > STALL_S

    def check_integrity(self) -> None:
        """Raises AssertionError naming what is wrong with the tiers' slots or the copies."""
        loads = [*self._loads.values(), *self._given_up]
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
                held = copy is not Copy.WHOLE or (
                    block_hash is not None and is_held(self.tiers, group.number, block_hash)
                )
                assert held, f"no tier holds the copy of block {block_id}"

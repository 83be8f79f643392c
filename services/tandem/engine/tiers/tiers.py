"""The tiers below the device's KV pool: what is written to them, and what comes back.

    device block   CACHED, one of the oldest --Write--> CACHED with a copy --evict--> FREE
    sequence       WAITING --admit--> LOADING --Load--> RUNNING, or WAITING_FOR_KV

The engine's thread decides and keeps the books, in `turn` and when a load ends. Two threads move
the bytes, one each way, and two others those of a store, which may be slow. A write starts at the
root of a chain and goes on to its leaf, and a tier evicts leaves first, so each tier holds whole
prefixes. A load that fails or stands still costs the time to compute its blocks. It changes no
token.

It knows the pool of a model without sliding windows, on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import SimpleQueue

from tandem.engine.cache.block import Copy
from tandem.engine.cache.block_pool import BlockPool
from tandem.engine.tiers.io_thread import IoThread, JobThread
from tandem.engine.tiers.jobs import Load, Part, Target, Write, write_all
from tandem.engine.tiers.lookups import Lookups
from tandem.engine.tiers.storage import Bytes, Entry
from tandem.engine.tiers.tier import Tier
from tandem.engine.types import TierBlocks, TierLoad
from tandem.perf_model.soonest import Reach, load_seconds

STALL_S = 2.0  # a load that gets no block for so long is given up
TURN_S = 1e-4  # of the engine's thread for what was written, and again for what is to be
_PAUSE_S = 1.0  # after a write that failed: the disk may be full
_WRITES_MAX = 64  # in flight
_CLOSE_S = 3.0  # for what is not written when the engine ends


class Tiers:
    def __init__(
        self,
        pool: BlockPool,
        memory: Bytes,
        tiers: Sequence[Tier],
        start_thread: Callable[[str], JobThread] = IoThread,
    ) -> None:
        """`memory` is that of the pool, [num_blocks, block_bytes]; the fastest tier comes first."""
        self._pool = pool
        self._memory = memory
        self.tiers = tiers
        lanes = dict.fromkeys(tier.storage.lane for tier in tiers)
        self._writers = {lane: start_thread(f"{lane}-writes") for lane in lanes}
        self._readers = {lane: start_thread(f"{lane}-loads") for lane in lanes}
        self._written: SimpleQueue[tuple[Write, Target]] = SimpleQueue()
        self._ended: SimpleQueue[Load] = SimpleQueue()
        self._writes: dict[int, Write] = {}  # in flight, by the device's block
        self._loads: dict[str, Load] = {}  # in flight, by their sequence
        self._given_up: list[Load] = []  # in flight, without a sequence
        self._generation = 0
        self.clock = time.monotonic
        self.turn_s = TURN_S
        self._paused_until = 0.0
        self._progress_at = dict.fromkeys(lanes, 0.0)  # of loads, as far as results were taken
        self.lookups = Lookups(tiers, start_thread, self.clock)
        self._writes_max = max(1, min(_WRITES_MAX, pool.num_blocks // 8))

    @property
    def has_news(self) -> bool:
        """True if `turn` or the end of a load has something to do for a sequence."""
        has_ended = not (self._ended.empty() and self._written.empty()) or self.lookups.has_ended
        has_events = any(tier.has_events for tier in self.tiers)
        return has_ended or has_events or self._wants_writes() or bool(self.find_stalled())

    @property
    def is_busy(self) -> bool:
        """True while threads work: `has_news` may turn True then."""
        is_reading = self._loads or any(not self._is_stalled(load) for load in self._given_up)
        return bool(is_reading or self._writes or self.lookups.is_busy)

    @property
    def num_fenced(self) -> int:
        """Device blocks that loads without a sequence may still write; they are quarantined."""
        return sum(len(load.unsafe_blocks) for load in self._given_up)

    def turn(self) -> None:
        """Takes what was written and starts further writes, for 2 * `turn_s` at most."""
        if not self.tiers:
            return
        until = time.perf_counter() + self.turn_s
        while not self._written.empty() and time.perf_counter() < until:
            self._settle(*self._written.get_nowait())
        self.lookups.turn()
        if self._wants_writes():
            self._start_writes(time.perf_counter() + self.turn_s)
        self._follow_evictions()

    def use(self, block_hashes: Sequence[bytes], *, keep: bool) -> None:
        """A sequence computed these blocks or reuses them; `keep`: they are likely to return."""
        for tier in self.tiers:
            tier.policy.use(block_hashes, keep=keep)

    def reach(self, block_hashes: Sequence[bytes]) -> list[Reach]:
        """Returns how many first blocks of a chain each tier has, and its measured price of one; 0
        before a load was measured."""
        # A thread whose load stands still would come to no other one.
        stalled = {load.lane for load in self._given_up if self._is_stalled(load)}
        return [
            Reach(
                0 if tier.storage.lane in stalled else tier.depth(block_hashes), tier.rate.block_s
            )
            for tier in self.tiers
        ]

    def decline(self) -> None:
        """A load was not made, because another way looked sooner."""
        for tier in self.tiers:
            tier.rate.decline()

    def load(
        self,
        sequence_id: str,
        block_hashes: Sequence[bytes],
        first: int,
        block_ids: Sequence[int],
        *,
        num_spared: int = 0,
    ) -> None:
        """Starts to fill `block_ids` with the chain's blocks from `first` on; a tier has them.

        The engine is expected to compute the first `num_spared` of them meanwhile (`take`).
        """
        end, at = first + len(block_ids), first
        parts: list[Part] = []
        ends: dict[int, int] = {}
        tables: dict[int, list[int]] = {}
        for tier in self.tiers:
            depth = min(end, tier.pool.depth(block_hashes))
            if depth <= at:
                continue
            found = tier.pool.reserve(block_hashes[:depth], depth)
            assert found is not None
            table = tables[tier.number] = found.block_table
            parts += [
                Part(
                    tier.number,
                    tier.storage,
                    table[i],
                    block_hashes[i],
                    block_ids[i - first],
                    self._memory[block_ids[i - first]],
                )
                for i in range(at, depth)
            ]
            at = depth
            ends[tier.number] = len(parts)
        assert at == end, "no tier has these blocks"
        lane = parts[-1].storage.lane
        load = Load(
            sequence_id,
            lane,
            first,
            parts,
            tables,
            ends,
            self._ended.put,
            self.clock,
            self.clock(),
            num_spared=num_spared,
        )
        self._loads[sequence_id] = load
        self._readers[lane].submit(load)

    def reach_of(self, load: Load) -> list[Reach]:
        """Returns where the blocks of a load come from."""
        return [
            Reach(load.first_block + end, self.tiers[number].rate.block_s)
            for number, end in load.ends.items()
        ]

    def take_ended(self) -> list[Load]:
        """Returns the loads that ended, but those given up; their blocks are no more written."""
        ended = []
        while not self._ended.empty():
            load = self._ended.get_nowait()
            self._progress_at[load.lane] = self.clock()
            for number, table in load.tables.items():
                self.tiers[number].pool.release(table)
            self._observe(load)
            if load.is_given_up:
                self._given_up.remove(load)
                self._pool.unquarantine(load.unsafe_blocks)
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
        return load.unsafe_blocks

    def find_load(self, sequence_id: str) -> Load:
        """Returns the load of a sequence that is LOADING."""
        return self._loads[sequence_id]

    def find_stalled(self) -> list[str]:
        """Returns the sequences whose loads stand still."""
        return [name for name, load in self._loads.items() if self._is_stalled(load)]

    def reset(self) -> None:
        """Forgets all copies. What is on its way to a tier is forgotten when it comes there."""
        self._generation += 1
        for tier in self.tiers:
            tier.pool.drop_cached()
            self._writers[tier.storage.lane].submit(tier.storage.forget)
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
        return [] if tier is None else tier.pool.readable_hashes(first, end)

    def loads(self) -> list[TierLoad]:
        return [tier.load() for tier in self.tiers]

    def close(self) -> None:
        """Writes what has no copy yet, for `_CLOSE_S` at most, and ends the threads."""
        if not self.tiers:
            return
        until = self.clock() + _CLOSE_S
        while self.clock() < until and (self._wants_writes() or self._writes):
            self.turn()
            time.sleep(1e-3)
        for writer in self._writers.values():
            writer.close(max(0.0, until - self.clock()))
        for reader in self._readers.values():
            reader.close(0.0)
        self.lookups.close()
        for tier in self.tiers:
            tier.storage.close()

    def _wants_writes(self) -> bool:
        return (
            bool(self.tiers)
            and len(self._writes) < self._writes_max
            and self._pool.next_unwritten is not None
            and self.clock() >= self._paused_until
        )

    def _start_writes(self, until: float) -> None:
        """Starts to write blocks that have no copy, in one job for each lane."""
        writes: dict[str, list[tuple[Write, Target]]] = {}
        while len(self._writes) < self._writes_max and time.perf_counter() < until:
            block_id = self._pool.next_unwritten
            if block_id is None:
                break
            entry = Entry(*self._pool.names_of(block_id))
            targets = [t for tier in self.tiers if (t := tier.target(entry)) is not None]
            self._pool.start_write(block_id)
            if targets:
                data = self._memory[block_id]
                write = Write(block_id, entry, data, targets, self._generation, self._on_written)
                self._writes[block_id] = write
                for target in targets:
                    writes.setdefault(target.storage.lane, []).append((write, target))
            else:  # a tier has it, or none has its parent or a slot
                self._pool.end_write(block_id, is_whole=self._is_held(entry.block_hash))
        for lane, of_lane in writes.items():
            self._writers[lane].submit(partial(write_all, of_lane))

    def _on_written(self, write: Write, target: Target) -> None:
        self._written.put((write, target))

    def _settle(self, write: Write, target: Target) -> None:
        is_current = write.generation == self._generation
        self.tiers[target.tier].settle(write.entry, target, is_current=is_current)
        if not target.is_written and target.storage.is_ready:
            self._pause()  # but one that is not ready takes no writes meanwhile
        target.is_settled = True
        if not all(each.is_settled for each in write.targets):
            return
        del self._writes[write.block_id]
        self._pool.end_write(write.block_id, is_whole=self._is_held(write.entry.block_hash))

    def _pause(self) -> None:
        self._paused_until = self.clock() + _PAUSE_S

    def _is_held(self, block_hash: bytes) -> bool:
        return any(tier.pool.has(block_hash) for tier in self.tiers)

    def _follow_evictions(self) -> None:
        for tier in self.tiers:
            for block_hash in tier.follow_evictions():
                if not self._is_held(block_hash):
                    self._pool.lose_copy(block_hash)

    def _observe(self, load: Load) -> None:
        for tier in self.tiers:
            num_read = sum(part.tier == tier.number for part in load.parts_read)
            if num_read:
                tier.num_loaded += num_read
                tier.rate.observe(num_read, load.seconds[tier.number])
        if load.failed is not None:
            tier = self.tiers[load.failed.tier]
            tier.mark_bad(load.failed.block_hash)
            if not self._is_held(load.failed.block_hash):
                self._pool.lose_copy(load.failed.block_hash)

    def _is_stalled(self, load: Load) -> bool:
        in_flight: Iterable[Load] = (*self._loads.values(), *self._given_up)
        of_lane = (each.progress_at for each in in_flight if each.lane == load.lane)
        last = max(*of_lane, self._progress_at[load.lane], load.submitted_at)
        return self.clock() - last > STALL_S

    def check_integrity(self) -> None:
        """Raises AssertionError naming what is wrong with the tiers' slots or the copies."""
        loads = [*self._loads.values(), *self._given_up]
        for tier in self.tiers:
            tables = [load.tables[tier.number] for load in loads if tier.number in load.tables]
            tables += [
                target.table
                for write in self._writes.values()
                for target in write.targets
                if target.tier == tier.number and not target.is_settled
            ]
            tier.pool.check_integrity(tables)
        for block_id, block_hash, copy in self._pool.copies():
            assert (copy is Copy.WRITING) == (block_id in self._writes), f"{block_id} is {copy}"
            held = copy is not Copy.WHOLE or (block_hash is not None and self._is_held(block_hash))
            assert held, f"no tier holds the copy of block {block_id}"

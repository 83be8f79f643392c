"""Writes blocks to the tiers. The state of a block's copy (`Copy`) changes as follows:

    NONE --start--> WRITING --settle--> COMPLETE or LOST

The engine's thread starts writes, in the order of `BlockPool.next_unwritten`, and handles the ends
of writes. Each tier's writer thread moves the bytes. A block is written to all tiers that accept
it, and its write ends when it has ended in each of these tiers. A tier that hangs or fails gets no
new writes for a while. It does not block writes to other tiers.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from tandem.engine.cache.pool.block_pool import BlockPool
from tandem.engine.cache.pool.window_pool import FrozenStatePool
from tandem.engine.tiers.device.blocks import Channel, DeviceBlocks, Event
from tandem.engine.tiers.io_thread import JobThread
from tandem.engine.tiers.jobs import Target, Write, write_all
from tandem.engine.tiers.storage import Entry
from tandem.engine.tiers.tier import Tier, is_held

HUNG_S = 2.0  # a tier with writes in flight hangs if none of them ends for this many seconds
_PAUSE_S = 1.0  # seconds without new writes to a tier after a failed write; its disk may be full
_WRITES_MAX = 64  # maximum number of writes in flight for one KV group


@dataclass(slots=True)
class PoolGroup:
    """The pool of one KV group, the channels to its blocks, and its writes in flight."""

    number: int
    pool: BlockPool
    blocks: DeviceBlocks
    channels_out: list[Channel]  # channels of the writer threads, one per tier
    channels_in: list[Channel]  # channels of the reader threads, one per tier
    # Writes in flight, by the block's id in the pool.
    writes: dict[int, Write] = field(default_factory=dict)
    writes_max: int = field(init=False)

    def __post_init__(self) -> None:
        self.writes_max = max(1, min(_WRITES_MAX, self.pool.num_blocks // 8))
        if isinstance(self.pool, FrozenStatePool):
            # A slot that is copied cannot be evicted, and the scheduler leaves one for copies.
            self.writes_max = 1

    def wants_writes(self, hung: Set[int]) -> bool:
        """Returns whether another write may start. Writes that wait only for tiers in `hung` do not
        count against the limit."""
        if not self.pool.has_unwritten:
            return False
        num_writes = len(self.writes)
        if hung:
            num_writes = sum(not write.awaits <= hung for write in self.writes.values())
        return num_writes < self.writes_max


class WriteProgress:
    """Detects whether the writes of one tier hang.

    The engine's thread counts the writes that start, and the tier's thread counts those that end.
    Each counter has one writer, so no lock is needed.
    """

    def __init__(self) -> None:
        self._num_begun = 0
        self._num_ended = 0
        # Time at which the latest write ended. If a write starts while no other is in flight, the
        # time of this start.
        self._at = 0.0

    def begin(self, now: float) -> None:
        """Records that a write is passed to the tier's thread."""
        if self._num_begun == self._num_ended:
            self._at = now
        self._num_begun += 1

    def end(self, now: float) -> None:
        """Records that a write ended, with or without success."""
        self._at = now
        self._num_ended += 1

    def is_stalled(self, now: float, limit_s: float) -> bool:
        """Returns whether writes are in flight and none has ended for `limit_s` seconds."""
        return self._num_begun > self._num_ended and now - self._at > limit_s


class Writes:
    def __init__(
        self,
        groups: Sequence[PoolGroup],
        tiers: Sequence[Tier],
        threads: Sequence[JobThread],
        clock: Callable[[], float],
    ) -> None:
        """`threads` has the writer thread of each tier."""
        self._groups = groups
        self._tiers = tiers
        self._threads = threads
        self._clock = clock
        self._progress = [WriteProgress() for _ in tiers]
        self._ended: SimpleQueue[tuple[Write, Target]] = SimpleQueue()
        self._num_resets = 0

    @property
    def are_under_way(self) -> bool:
        return any(group.writes for group in self._groups)

    @property
    def have_ended(self) -> bool:
        """True if a write ended and `settle` has not handled it yet."""
        return not self._ended.empty()

    @property
    def are_wanted(self) -> bool:
        """True if a block waits to be copied and a tier could take it now."""
        if not any(group.pool.has_unwritten for group in self._groups):
            return False
        hung = self._hung
        return any(g.wants_writes(hung) for g in self._groups) and bool(self._writable(hung))

    def start(self, until: float) -> None:
        """Starts to write blocks that have no copy, one block of each group in turn. The writes of
        one group to one tier run as one job.

        Continues until the time `until` of `time.perf_counter`, but starts at least one block.
        """
        writes: defaultdict[tuple[int, int], list[tuple[Write, Target]]] = defaultdict(list)
        # once the device has reached this event, all stored blocks are full
        after = self._groups[0].blocks.mark()
        hung = self._hung
        tiers = self._writable(hung)
        groups = deque(group for group in self._groups if group.wants_writes(hung))
        while groups:
            group = groups.popleft()
            for write, target in self._start_one(group, tiers, after):
                writes[target.tier, group.number].append((write, target))
            if time.perf_counter() >= until:
                break
            if group.wants_writes(hung):
                groups.append(group)
        for (tier, number), of_tier in writes.items():
            channel = self._groups[number].channels_out[tier]
            self._threads[tier].submit(partial(write_all, of_tier, channel))

    def settle(self, until: float) -> None:
        """Handles writes that ended, until the time `until` of `time.perf_counter`. Handles at
        least one."""
        while not self._ended.empty():
            self._settle_one(*self._ended.get_nowait())
            if time.perf_counter() >= until:
                return

    def forget(self) -> None:
        """Makes the tiers drop the blocks that are being written now, as soon as their writes
        end."""
        self._num_resets += 1

    def _writable(self, hung: Set[int]) -> list[Tier]:
        now = self._clock()
        return [t for t in self._tiers if now >= t.paused_until and t.number not in hung]

    @property
    def _hung(self) -> set[int]:
        """The numbers of the tiers that hang. Such a tier gets no more writes until one of its
        writes ends."""
        now = self._clock()
        progress = enumerate(self._progress)
        return {number for number, each in progress if each.is_stalled(now, HUNG_S)}

    def _start_one(
        self, group: PoolGroup, tiers: Sequence[Tier], after: Event
    ) -> list[tuple[Write, Target]]:
        block_id = group.pool.next_unwritten
        assert block_id is not None
        entry = Entry(*group.pool.hashes_of(block_id))
        found = (tier.groups[group.number].target(entry) for tier in tiers)
        targets = [target for target in found if target is not None]
        if not targets:  # a tier already has the block, or no tier accepts it
            has_copy = is_held(self._tiers, group.number, entry.block_hash)
            group.pool.end_write(block_id, has_copy=has_copy)
            return []
        group.pool.start_write(block_id)
        write = Write(block_id, entry, after, targets, self._num_resets, self._end, group.number)
        group.writes[block_id] = write
        for target in targets:
            self._progress[target.tier].begin(self._clock())
        return [(write, target) for target in targets]

    def _end(self, write: Write, target: Target) -> None:
        """Records that the write to one tier ended. Called in the tier's thread."""
        self._progress[target.tier].end(self._clock())
        self._ended.put((write, target))

    def _settle_one(self, write: Write, target: Target) -> None:
        is_current = write.num_resets == self._num_resets
        tier = self._tiers[target.tier]
        group = self._groups[write.group]
        tier.settle(group.number, write.entry, target, is_current=is_current)
        if not target.is_written and target.storage.is_ready:
            # A storage that is not ready needs no pause, because it accepts no writes anyway.
            tier.paused_until = self._clock() + _PAUSE_S
        target.is_settled = True
        if len(write.targets) > 1 and not all(each.is_settled for each in write.targets):
            return
        del group.writes[write.block_id]
        has_copy = is_held(self._tiers, group.number, write.entry.block_hash)
        group.pool.end_write(write.block_id, has_copy=has_copy)

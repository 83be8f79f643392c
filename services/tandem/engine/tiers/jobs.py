"""The jobs of the tiers' threads: writes of blocks to a tier, and loads of a sequence's blocks from
tiers.

A job keeps its resources until the engine has handled the end of the job: the block of a write is
not allocated again, and the slots of a load stay referenced. A job cannot be stopped in the middle
of a block. A load that fails or is cancelled may have copies to the device in flight. It ends only
when these copies are done.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from tandem.engine.tiers.device.blocks import Channel, Event
from tandem.engine.tiers.storage import BadBlock, Bytes, Entry, Storage

log = logging.getLogger(__name__)

_AHEAD = 16  # maximum number of reads in flight for one load
# Error numbers of reads that may be temporary: a busy device, or a storage path that is failing
# over. After such an error, the read is tried once more. Otherwise the engine would have to compute
# this block and all blocks before it, because a load reads from the last block to the first.
_PASSING = frozenset({errno.EINTR, errno.EAGAIN, errno.EIO})


@dataclass(slots=True)
class Target:
    """The slot in one tier to which a block is written."""

    tier: int
    storage: Storage
    # The slots that this write references until it is settled. The block is written to the last
    # slot. If an unreadable copy is replaced, the slots of the blocks before it in the chain come
    # first.
    table: list[int]
    # True: an unreadable copy in the slot is replaced. False: the slot is empty.
    is_rewrite: bool
    is_written: bool = False
    is_settled: bool = False  # True: the engine has handled the end of the write


@dataclass(slots=True)
class Write:
    block_id: int
    entry: Entry
    after: Event  # once the device has reached this event, the block is full
    targets: list[Target]
    num_resets: int  # how many times the tiers were reset before this write
    on_end: Callable[[Write, Target], object]
    group: int = 0  # the KV group of the block

    @property
    def awaits(self) -> set[int]:
        """Numbers of the tiers for which the engine has not yet handled the end of this write."""
        return {target.tier for target in self.targets if not target.is_settled}

    def begin_out(self, target: Target, channel: Channel) -> Callable[[], Bytes]:
        """Starts to copy the block to host memory, for the write to one target. The returned
        function waits for the end of the copy and returns the bytes."""
        return channel.begin_out(self.block_id, self.after, target.storage.memory(target.table[-1]))

    def begin(self, target: Target, data: Bytes) -> Callable[[], None]:
        """Starts to write the block's bytes `data` to one target. The returned function waits for
        the end of the write and calls `on_end`."""
        end_write = target.storage.begin_write(target.table[-1], self.entry, data)

        def end() -> None:
            try:
                end_write()
                target.is_written = True
            except OSError as error:
                log.debug(
                    "a block cannot be written to the KV cache tier %s: %s",
                    target.storage.name,
                    error,
                )
            finally:
                self.on_end(self, target)

        return end


def write_all(writes: Sequence[tuple[Write, Target]], channel: Channel) -> None:
    """Writes blocks of one KV group to one tier.

    `on_end` is called once for each write, even if a write raises an error. After an error no more
    writes are started. For a write in flight, `on_end` is called only when nothing reads the block
    any more.
    """
    num_begun = 0
    try:
        for first in range(0, len(writes), channel.num_at_once):
            some = writes[first : first + channel.num_at_once]
            copies = [write.begin_out(target, channel) for write, target in some]
            ends: list[Callable[[], None]] = []
            try:
                for (write, target), end_copy in zip(some, copies, strict=True):
                    ends.append(write.begin(target, end_copy()))
                    num_begun += 1
            finally:
                _call_all(ends)
    finally:
        for write, target in writes[num_begun:]:
            write.on_end(write, target)


def _call_all(calls: Iterable[Callable[[], None]]) -> None:
    """Calls all functions, even if some raise. Then raises the first error."""
    errors: list[BaseException] = []
    for call in calls:
        try:
            call()
        # A panic in obstore is a BaseException, but not an Exception.
        except BaseException as error:
            errors.append(error)
    if errors:
        raise errors[0]


class LoadPart(NamedTuple):
    """One read of a load: from a slot of a tier into a block of a KV group's pool."""

    tier: int
    storage: Storage
    slot: int
    block_hash: bytes
    block_id: int  # the block's id in the pool of `group`
    chain_index: int = 0
    group: int = 0

    def begin_read(self) -> Callable[[Bytes], None]:
        return self.storage.begin_read(self.slot, self.block_hash)

    def end_read(self, end: Callable[[Bytes], None], target: Bytes) -> None:
        """Waits for the end of a read that `begin_read` started. Reads once more after an error
        that may be temporary.

        Raises the errors of `Storage.read`.
        """
        try:
            end(target)
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            log.info(
                "reading block %d of the KV cache tier %s failed and is tried once more: %s",
                self.slot,
                self.storage.name,
                error,
            )
            self.begin_read()(target)


@dataclass(slots=True, kw_only=True)
class Load:
    """Loads the missing blocks of one sequence from tiers, the last block first. A part of a load
    is the read of one block. Meanwhile the engine may compute the first blocks: it takes parts from
    the load (`take`), and the load does not read them.

    A load of 10 parts, in the middle of its work:

        part      state                      attributes
        0 to 1    taken by the engine        num_taken = 2
        2 to 5    not begun                  num_free = 6, the parts 0 to 5
        6 to 7    being read or copied       num_begun = 4, the parts 6 to 9
        8 to 9    loaded                     num_read = 2

    Each tier has a thread for reads. A load that needs several tiers moves from one tier's thread
    to the next, so a tier that hangs does not block loads from other tiers.
    """

    sequence_id: str
    # Hashes of the prompt's blocks, from the prompt's first block to the load's last block.
    chain: Sequence[bytes]
    parts: list[LoadPart]  # sorted by tier, the fastest first, and for each tier by chain index
    # The slots that the load references until it ends, by (tier, group).
    tables: dict[tuple[int, int], list[int]]
    # Average block size of the parts, as a fraction of the sum of all KV groups' block sizes.
    # For example, with two groups whose blocks have 3 MB and 1 MB, a load of only the first group's
    # blocks has a share of 0.75. With one group it is 1.0.
    share: float
    # Number of parts, from the first one on, that the engine is expected to compute. Reads that are
    # started in advance leave out these parts.
    num_spared: int

    channels: Sequence[Sequence[Channel]]  # channels[group][tier]
    after: Event  # copies to the pool start once the device has reached this event
    clock: Callable[[], float]  # returns the time in seconds
    on_end: Callable[[Load], object]
    continue_in: Callable[[int, Load], object]  # continues the load in the thread of the given tier

    # The fields from here on change during the load.
    num_taken: int = field(default=0, init=False)
    # Number of parts at the end of `parts` that are loaded or being read.
    num_begun: int = field(default=0, init=False)
    # Number of parts at the end of `parts` that are loaded.
    num_read: int = field(default=0, init=False)
    failed: LoadPart | None = field(default=None, init=False)
    # True: the load was cancelled, so it starts no more reads.
    is_cancelled: bool = field(default=False, init=False)
    # For each tier, 1 + the index in `parts` of the tier's last part.
    ends: dict[int, int] = field(init=False)
    tier: int = field(init=False)  # the tier from which the load reads now
    # `clock` time at which the load was submitted to the current tier's thread
    submitted_at: float = field(init=False)
    # `clock` time at which the load got its latest block from the current tier; 0: none yet.
    progress_at: float = field(default=0.0, init=False)
    # Tier -> seconds that the load spent on reads from it.
    seconds: dict[int, float] = field(default_factory=dict, init=False)
    # Tier -> seconds that one part was expected to take, as predicted when the load started.
    expected_s: dict[int, float] = field(default_factory=dict, init=False)
    # When the reads of the current tier started: (time, number of parts loaded before, index of the
    # tier's first part). None before the reads start.
    _since: tuple[float, int, int] | None = field(default=None, init=False)
    # Copies in flight: the event at the end of each copy, in the order in which the copies started.
    _copies_in_flight: deque[Event] = field(default_factory=deque, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        self.ends = {part.tier: number for number, part in enumerate(self.parts, 1)}
        self.tier = self.parts[-1].tier
        self.submitted_at = self.clock()

    @property
    def first_block(self) -> int:
        """Chain index of the first part's block."""
        return self.parts[0].chain_index

    def __call__(self) -> None:
        """Runs in the current tier's thread: reads the parts of this tier, and then continues with
        the next tier or ends."""
        tier: int | None = None
        try:
            tier = self._read_tier()
        finally:
            self._end(tier)

    @property
    def num_free(self) -> int:
        """Number of parts, from the first one on, that the load has not begun to read. The engine
        has taken some of these parts, or may take them."""
        return len(self.parts) - self.num_begun

    def take(self, num_parts: int) -> int:
        """Gives the first `num_parts` parts to the engine, which computes their blocks. Parts that
        the load has begun to read are not given. Returns the total number of parts that the engine
        has taken."""
        with self._lock:
            self.num_taken = max(self.num_taken, min(num_parts, self.num_free))
            return self.num_taken

    @property
    def is_whole(self) -> bool:
        """True if all parts are loaded."""
        return self.num_read == len(self.parts)

    @property
    def blocks(self) -> range:
        """Chain indices of the loaded blocks. Only correct if all parts belong to one KV group."""
        end = self.first_block + len(self.parts)
        return range(end - self.num_read, end)

    @property
    def pace(self) -> tuple[float, float, int]:
        """Progress in the current tier: (seconds since its reads started, seconds per part, number
        of parts left to read). All are 0 before the reads start."""
        if (since := self._since) is None:
            return 0.0, 0.0, 0
        began_at, num_before, first = since
        read_s = self.clock() - began_at
        num_left = self.num_free - max(self.num_taken, self.num_spared, first)
        return read_s, read_s / max(1, self.num_read - num_before), max(0, num_left)

    @property
    def first_expected(self) -> int:
        """Chain index of the first block that the load itself is expected to read."""
        return self.first_block + max(self.num_spared, self.num_taken)

    @property
    def unsafe_parts(self) -> list[LoadPart]:
        """The parts whose blocks the load may still write."""
        return self.parts[self.num_taken :]

    @property
    def num_read_by_tier(self) -> dict[str, int]:
        """Number of loaded blocks by the name of the tier. If a block's parts (one for each KV
        group) come from several tiers, the block counts for the slowest of these tiers."""
        if len(self.tables) == 1:  # one tier and one group
            return {self.parts[0].storage.name: self.num_read} if self.num_read else {}
        names = {part.chain_index: part.storage.name for part in self.parts_read}
        return dict(Counter(names.values()))

    @property
    def parts_read(self) -> list[LoadPart]:
        return self.parts[len(self.parts) - self.num_read :]

    def _read_tier(self) -> int | None:
        """Reads the parts of the current tier. Returns the tier to continue with; None if no part
        is left to read or a read failed."""
        first = next(i for i, part in enumerate(self.parts) if part.tier == self.tier)
        self._since = self.clock(), self.num_read, first
        begun: deque[Callable[[Bytes], None]] = deque()
        num_ahead = self.num_begun  # number of parts at the end of `parts` whose reads were started
        while (part := self._begin(first)) is not None:
            wanted = len(self.parts) - max(self.num_spared, self.num_taken, first)
            wanted = max(self.num_begun, min(wanted, self.num_begun + _AHEAD))
            for ahead in range(num_ahead, wanted):
                begun.append(self.parts[-1 - ahead].begin_read())
            num_ahead = max(num_ahead, wanted)
            if not self._read(part, begun.popleft()):
                return None
        is_left = self.num_free > self.num_taken and not self.is_cancelled
        return self.parts[self.num_free - 1].tier if is_left else None

    def _begin(self, first: int) -> LoadPart | None:
        """Returns the next part to read. Returns None if no part of the current tier is left;
        `first` is the index of the tier's first part."""
        with self._lock:
            if self.is_cancelled or self.num_free <= max(self.num_taken, first):
                return None
            self.num_begun += 1
            return self.parts[-self.num_begun]

    def _read(self, part: LoadPart, end_read: Callable[[Bytes], None]) -> bool:
        started = self.clock()
        try:
            channel = self.channels[part.group][part.tier]
            data = channel.buffer(part.block_id, part.storage.memory(part.slot))
            part.end_read(end_read, data)
        except (OSError, BadBlock) as error:
            log.warning(
                "block %d of the KV cache tier %s cannot be read, so its tokens are computed "
                "again: %s",
                part.slot,
                part.storage.name,
                error,
            )
            self.failed = part
            return False
        self._copies_in_flight.append(channel.begin_in(part.block_id, data, self.after))
        self._follow(channel.num_at_once - 1)
        self._spend(part.tier, started)
        return True

    def _follow(self, num_left: int) -> None:
        """Counts the parts whose copies to the device are done. Waits until at most `num_left`
        copies are in flight."""
        while self._copies_in_flight:
            if len(self._copies_in_flight) > num_left:
                self._copies_in_flight[0].synchronize()
            elif not self._copies_in_flight[0].query():
                return
            self._copies_in_flight.popleft()
            self.num_read += 1
            self.progress_at = self.clock()

    def _end(self, next_tier: int | None) -> None:
        """Waits for all started copies. Then ends the load, or continues in the next tier's
        thread."""
        started = self.clock()
        then = self.on_end
        try:
            if self._copies_in_flight:
                self._follow(0)
                self._spend(self.tier, started)
            if next_tier is not None:
                self._since = None
                then = partial(self.continue_in, next_tier)
        finally:
            then(self)

    def _spend(self, tier: int, started: float) -> None:
        self.seconds[tier] = self.seconds.get(tier, 0.0) + self.clock() - started

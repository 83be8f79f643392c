"""The jobs of the tiers' threads: to write blocks to a tier, and to read a sequence's blocks.

A job holds what it needs until its result is taken: the device's block cannot be handed out while
it is written, nor can the slots of a load. Nobody can stop a job in the middle of a block. A load
ends when all copies to the device that it began are done, also if it fails or is given up.
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

_AHEAD = 16  # reads of a load that are begun at once
# Errors of a read that may be over at once: a busy device, or a path to it that was just changed.
# A second try costs less than to compute the block and all that come before it.
_PASSING = frozenset({errno.EINTR, errno.EAGAIN, errno.EIO})


@dataclass(slots=True)
class Target:
    """A slot that a block is written to."""

    tier: int
    storage: Storage
    table: list[int]  # slots that are referenced meanwhile; the one to write is the last
    is_mended: bool  # the block is there, and was read badly
    is_written: bool = False
    is_settled: bool = False  # the engine took its end


@dataclass(slots=True)
class Write:
    block_id: int
    entry: Entry
    after: Event  # the block is full by then
    targets: list[Target]
    generation: int  # of the tiers' content
    on_end: Callable[[Write, Target], object]
    group: int = 0  # of the block

    @property
    def awaits(self) -> set[int]:
        """The tiers whose ends the engine has not taken."""
        return {target.tier for target in self.targets if not target.is_settled}

    def begin_out(self, target: Target, channel: Channel) -> Callable[[], Bytes]:
        """Begins to copy the block to the host, for one target; what is returned ends that."""
        return channel.begin_out(self.block_id, self.after, target.storage.memory(target.table[-1]))

    def begin(self, target: Target, data: Bytes) -> Callable[[], None]:
        """Begins to write one target; what is returned ends that, and tells the engine."""
        end_write = target.storage.begin_write(target.table[-1], self.entry, data)

        def end() -> None:
            try:
                end_write()
                target.is_written = True
            except OSError as error:
                log.debug("a block is not written to %s: %s", target.storage.name, error)
            finally:
                self.on_end(self, target)

        return end


def write_all(writes: Sequence[tuple[Write, Target]], channel: Channel) -> None:
    """Writes targets of one tier and KV group. Each ends, also if another one raises: those that
    are begun end when nothing reads their blocks any more, and no others are begun then."""
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
    """Makes all calls, also if some raise. Raises the first error then."""
    errors: list[BaseException] = []
    for call in calls:
        try:
            call()
        except BaseException as error:  # a panic of obstore is no Exception
            errors.append(error)
    if errors:
        raise errors[0]


class Part(NamedTuple):
    """One block of a load."""

    tier: int
    storage: Storage
    slot: int
    block_hash: bytes
    block_id: int  # in the pool of its group
    chain_index: int = 0
    group: int = 0

    def begin_read(self) -> Callable[[Bytes], None]:
        return self.storage.begin_read(self.slot, self.block_hash)

    def end_read(self, end: Callable[[Bytes], None], target: Bytes) -> None:
        """Ends a read that was begun. Reads once more after an error that may be over. Raises as
        `Storage.read` does."""
        try:
            end(target)
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            log.info("block %d is read from %s again: %s", self.slot, self.storage.name, error)
            self.begin_read()(target)


@dataclass(slots=True, kw_only=True)
class Load:
    """Reads blocks from the last to the first. The engine may compute the first ones meanwhile: it
    takes those parts from the load, and nobody reads them then.

        [ taken by the engine | not read yet | being read, or on the way | in place ]
                      num_taken                                     num_parts - num_read

    Each tier has a thread for reads. A load goes from the thread of one to that of the next, so a
    tier that hangs keeps no thread from another one's loads.
    """

    sequence_id: str
    chain: Sequence[bytes]  # hashes of the prompt's blocks, as deep as it is loaded
    parts: list[Part]  # tier by tier, the fastest one first; of a tier in the chain's order
    tables: dict[tuple[int, int], list[int]]  # by tier, group: slots that are referenced meanwhile
    share: float  # bytes of a part, on average, in those of a block of all groups
    num_spared: int  # first parts that the engine is expected to compute

    channels: Sequence[Sequence[Channel]]  # of each group, by tier
    after: Event  # the engine's work on the blocks before they were handed out
    clock: Callable[[], float]  # in seconds
    on_end: Callable[[Load], object]
    go_on: Callable[[int, Load], object]  # in the thread of this tier

    # Set by itself, its thread and the engine.
    num_taken: int = field(default=0, init=False)
    num_begun: int = field(default=0, init=False)  # last parts that are in place, or being read
    num_read: int = field(default=0, init=False)  # last parts that are in place
    failed: Part | None = field(default=None, init=False)
    is_given_up: bool = field(default=False, init=False)  # its sequence is gone: it reads no more
    ends: dict[int, int] = field(init=False)  # by tier: the number of parts up to its last one
    tier: int = field(init=False)  # in whose thread it is
    submitted_at: float = field(init=False)  # to that thread
    progress_at: float = field(default=0.0, init=False)
    seconds: dict[int, float] = field(default_factory=dict, init=False)  # by tier
    expected_s: dict[int, float] = field(default_factory=dict, init=False)  # of a part, by tier
    # When its tier's reads began, how many parts were in place, and the tier's first part; None:
    # they have not begun.
    _since: tuple[float, int, int] | None = field(default=None, init=False)
    _on_the_way: deque[Event] = field(default_factory=deque, init=False)  # copies, last parts first
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        self.ends = {part.tier: number for number, part in enumerate(self.parts, 1)}
        self.tier = self.parts[-1].tier
        self.submitted_at = self.clock()

    @property
    def first_block(self) -> int:
        """Index of the first part in its chain."""
        return self.parts[0].chain_index

    def __call__(self) -> None:
        """Reads the parts of its tier. Then it goes on with those of the next tier, or ends."""
        tier: int | None = None
        try:
            tier = self._read_tier()
        finally:
            self._end(tier)

    @property
    def num_free(self) -> int:
        """First parts that the engine may take, or has taken."""
        return len(self.parts) - self.num_begun

    def take(self, num_parts: int) -> int:
        """The engine computes the first `num_parts`, as far as they are not begun; returns how many
        these are."""
        with self._lock:
            self.num_taken = max(self.num_taken, min(num_parts, self.num_free))
            return self.num_taken

    @property
    def is_whole(self) -> bool:
        """True if all parts are in place."""
        return self.num_read == len(self.parts)

    @property
    def blocks(self) -> range:
        """Indexes in its chain of the blocks that are in place, if parts are of one group."""
        end = self.first_block + len(self.parts)
        return range(end - self.num_read, end)

    @property
    def pace(self) -> tuple[float, float, int]:
        """Returns how long the tier in whose thread it is has read, in seconds, how long it takes
        for a part, and how many of its parts are left; zeros before it has begun."""
        if (since := self._since) is None:
            return 0.0, 0.0, 0
        began_at, num_before, first = since
        read_s = self.clock() - began_at
        num_left = self.num_free - max(self.num_taken, self.num_spared, first)
        return read_s, read_s / max(1, self.num_read - num_before), max(0, num_left)

    @property
    def first_expected(self) -> int:
        """Index in its chain of the first block that is expected to be read."""
        return self.first_block + max(self.num_spared, self.num_taken)

    @property
    def unsafe_parts(self) -> list[Part]:
        """Parts whose blocks may be written as long as the load has not ended."""
        return self.parts[self.num_taken :]

    @property
    def num_read_by_tier(self) -> dict[str, int]:
        """Blocks that are in place, by the name of the tier that they came from; of several groups
        the slowest one counts."""
        names = {part.chain_index: part.storage.name for part in self.parts_read}
        return dict(Counter(names.values()))

    @property
    def parts_read(self) -> list[Part]:
        return self.parts[len(self.parts) - self.num_read :]

    def _read_tier(self) -> int | None:
        """Returns the tier of the parts that are left to read, if there are any."""
        first = next(i for i, part in enumerate(self.parts) if part.tier == self.tier)
        self._since = self.clock(), self.num_read, first
        begun: deque[Callable[[Bytes], None]] = deque()
        num_ahead = self.num_begun  # last parts whose reads were begun
        while (part := self._begin(first)) is not None:
            wanted = len(self.parts) - max(self.num_spared, self.num_taken, first)
            wanted = max(self.num_begun, min(wanted, self.num_begun + _AHEAD))
            for ahead in range(num_ahead, wanted):
                begun.append(self.parts[-1 - ahead].begin_read())
            num_ahead = max(num_ahead, wanted)
            if not self._read(part, begun.popleft()):
                return None
        is_left = self.num_free > self.num_taken and not self.is_given_up
        return self.parts[self.num_free - 1].tier if is_left else None

    def _begin(self, first: int) -> Part | None:
        """Returns the next part to read, if that is not before the part at `first`."""
        with self._lock:
            if self.is_given_up or self.num_free <= max(self.num_taken, first):
                return None
            self.num_begun += 1
            return self.parts[-self.num_begun]

    def _read(self, part: Part, end_read: Callable[[Bytes], None]) -> bool:
        started = self.clock()
        try:
            channel = self.channels[part.group][part.tier]
            data = channel.buffer(part.block_id, part.storage.memory(part.slot))
            part.end_read(end_read, data)
        except (OSError, BadBlock) as error:
            log.warning("block %d cannot be read from %s: %s", part.slot, part.storage.name, error)
            self.failed = part
            return False
        self._on_the_way.append(channel.begin_in(part.block_id, data, self.after))
        self._follow(channel.num_at_once - 1)
        self._spend(part.tier, started)
        return True

    def _follow(self, num_left: int) -> None:
        """Counts the copies that are done. Waits while more than `num_left` are not."""
        while self._on_the_way:
            if len(self._on_the_way) > num_left:
                self._on_the_way[0].synchronize()
            elif not self._on_the_way[0].query():
                return
            self._on_the_way.popleft()
            self.num_read += 1
            self.progress_at = self.clock()

    def _end(self, next_tier: int | None) -> None:
        """Waits for the copies that were begun. Then it ends, or goes on."""
        started = self.clock()
        then = self.on_end
        try:
            if self._on_the_way:
                self._follow(0)
                self._spend(self.tier, started)
            if next_tier is not None:
                self._since = None
                then = partial(self.go_on, next_tier)
        finally:
            then(self)

    def _spend(self, tier: int, started: float) -> None:
        self.seconds[tier] = self.seconds.get(tier, 0.0) + self.clock() - started

"""One shard of the prefix tree in a router's memory, kept in step with Redis by the shard's log.

This module does no I/O; replica.py reads from Redis. The log is the stream that the Lua scripts
write (lua/append.lua). `position` is the id of the log's entry that was applied last.

A *generation* is what the replica knows of one log of a worker, which has one epoch. It has a slot
of the table, from 0 to 63. A generation is in one of these states:

    state    begins                                             look-ups   ends
    loading  when a scan of the shard begins                    ignore it  live
    live     when the scan has ended and `position` has         use it     old, or dropped
             reached its end, or with a new log of the worker
    old      when the scan of a newer generation of the same    use it     dropped
             process begins, or with its new log

An old generation is dropped when the newer one is complete, which means that the worker has
published all its blocks, or after `OLD_S` seconds. A worker's new process has an empty pool, so its
first log drops all generations of the process before. If a worker is dropped from the tree, all its
generations are dropped at once.

A scan takes many calls while the tree changes. For each of its calls: the log is applied only up to
an entry before the call, the call's entries are added, and later entries of the log are applied to
them. Adding and removing a block twice changes nothing. So when `position` reaches the entry that
was the last one at the end of the scan, the generation has exactly the blocks of the tree.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tandem.common.block_hash import HASH_BYTES
from tandem.prefix_index.entries import ENTRY_BYTES

try:
    from tandem.prefix_index._replica_table import Table
except ImportError:
    IS_COMPILED = False  # then routers ask Redis, and nothing makes a Table
else:
    IS_COMPILED = True

OLD_S = 30.0  # an old generation is used for at most this many seconds
NUM_SLOTS = 64
NUM_PARTS = 256  # parts of a Table
LOST = b"lost"  # id of the log's last entry if it could not be written (lua/append.lua)
_ALL_SLOTS = (1 << NUM_SLOTS) - 1


class LogBroken(Exception):
    """The log has no entry that follows the replica's position, so the shard must be read again."""


class GenerationState(Enum):
    LOADING = "loading"
    LIVE = "live"
    OLD = "old"


@dataclass(slots=True, eq=False)
class WorkerGeneration:
    shard: ShardReplica
    worker_id: str
    epoch: str
    slot: int
    state: GenerationState
    is_complete: bool = False  # True: the worker has published all its blocks under this epoch
    old_until: float = 0.0  # monotonic seconds; for the state `old`


# Worker id -> its generations in all shards. The shards of a replica share one such dict, because a
# worker may move to another shard.
Generations = dict[str, list[WorkerGeneration]]


@dataclass(frozen=True, slots=True)
class ScannedWorker:
    slot: int  # in Redis
    worker_id: str
    epoch: str
    is_logged: bool  # False: a worker of an older version, whose changes are not in the log
    is_complete: bool
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Scan:
    """The reply of lua/scan.lua."""

    end: int  # the first bucket that was not read
    now_ms: int  # Redis's clock
    origin: bytes  # id of the log's first entry; another one means that the shard's data were lost
    log: bytes  # id of the log's last entry
    has_next: bool  # True: another shard exists
    workers: tuple[ScannedWorker, ...]
    entries: tuple[tuple[int, bytes], ...]  # (mask of slots in Redis, entries with this mask)

    @classmethod
    def of(cls, reply: Sequence[Any]) -> Scan:
        end, now_ms, origin, log, has_next, workers, entries = reply
        return cls(
            end,
            now_ms,
            origin,
            log,
            bool(has_next),
            tuple(
                ScannedWorker(
                    slot,
                    worker_id.decode(errors="replace"),
                    epoch.decode(errors="replace"),
                    bool(is_logged),
                    bool(is_complete),
                    num_blocks,
                )
                for slot, worker_id, epoch, is_logged, is_complete, num_blocks in _rows(workers, 6)
            ),
            tuple((mask, packed) for mask, packed in _rows(entries, 2)),
        )


@dataclass(slots=True)
class ShardReplica:
    """The replica of one shard. Times are monotonic seconds."""

    generations: Generations
    table: Table = field(default_factory=lambda: Table(secrets.randbits(64)))
    position: bytes | None = None  # None: the shard must be read from the tree
    origin: bytes = b""  # `Scan.origin` of the last scan
    is_loaded: bool = False  # True: the shard was read once
    has_unlogged: bool = False  # True: the log lacks the changes of some worker
    _slots: dict[int, WorkerGeneration] = field(default_factory=dict)
    _used: int = 0  # mask of the slots that look-ups use: those of live and old generations
    _dropped: int = 0  # mask of dropped slots whose bits are still in the table
    _sweeping: int = 0  # mask of the dropped slots whose bits the current sweep clears
    _part: int = 0  # next part of the current sweep

    @property
    def is_usable(self) -> bool:
        return self.is_loaded and not self.has_unlogged

    @property
    def is_loading(self) -> bool:
        return any(each.state is GenerationState.LOADING for each in self._slots.values())

    def match(self, block_hashes: Sequence[bytes], *, closed: bool) -> dict[str, int]:
        """Returns worker id -> depth, as `PrefixIndex.match` does."""
        depths: dict[str, int] = {}
        for slot, depth in _rows(self.table.match(block_hashes, self._used, closed), 2):
            worker_id = self._slots[slot].worker_id
            if depth > depths.get(worker_id, 0):
                depths[worker_id] = depth
        return depths

    def num_blocks(self, worker_id: str) -> int:
        """Returns the number of blocks in the worker's live generation."""
        live = (each for each in self._of(worker_id) if each.state is GenerationState.LIVE)
        return sum(self.table.count(each.slot) for each in live)

    def begin_load(self, scan: Scan, now: float, worker_ids: Collection[str] | None = None) -> None:
        """Begins to load the given workers from the tree. By default, loads all workers, and
        `position` becomes that of `scan`. The caller then calls `add` for scans of all buckets.

        If the tree's data were lost, workers that it lacks stay in use for `OLD_S`, because they
        publish all their blocks again.
        """
        if worker_ids is None:
            worker_ids = {worker.worker_id for worker in scan.workers}
            for each in list(self._slots.values()):
                if each.worker_id in worker_ids or scan.origin != self.origin:
                    self._supersede(each, now)
                else:
                    self.drop(each)
            self.position = scan.log
            self.origin = scan.origin
        for worker in scan.workers:
            if worker.worker_id not in worker_ids or not worker.is_logged:
                continue
            for each in self._of(worker.worker_id):
                if each.epoch == worker.epoch or _are_of_one_process(each.epoch, worker.epoch):
                    self._supersede(each, now)
                else:
                    self.drop(each)
            self._begin(worker.worker_id, worker.epoch, GenerationState.LOADING, worker.is_complete)

    def add(self, scan: Scan) -> None:
        """Adds scanned entries to the generations that are loading."""
        bits = {
            1 << worker.slot: 1 << each.slot
            for worker in scan.workers
            for each in self._of(worker.worker_id)
            if each.state is GenerationState.LOADING and each.epoch == worker.epoch
        }
        for scanned, packed in scan.entries:
            mask = sum(bit for of_worker, bit in bits.items() if scanned & of_worker)
            if mask:
                self.table.add(mask, packed, ENTRY_BYTES)

    def apply(self, entry_id: bytes, entry: Mapping[bytes, bytes], now: float) -> None:
        """Applies the next entry of the log. Raises LogBroken, and changes nothing, if it is not
        the next one."""
        if entry[b"after"] != self.position:
            raise LogBroken
        worker_id = entry[b"worker"].decode(errors="replace")
        epoch = entry.get(b"epoch", b"").decode(errors="replace")
        match entry[b"kind"]:
            case b"blocks":
                if mask := sum(1 << e.slot for e in self._of(worker_id) if e.epoch == epoch):
                    self.table.add(mask, entry[b"stored"], HASH_BYTES)
                    self.table.remove(mask, entry[b"removed"], HASH_BYTES)
                if entry[b"complete"] == b"1":
                    self._complete(worker_id, epoch)
            case b"reset":
                for each in list(self.generations.get(worker_id, ())):
                    if each.epoch != epoch and _are_of_one_process(each.epoch, epoch):
                        each.shard._supersede(each, now)
                    else:
                        each.shard.drop(each)
                self._begin(worker_id, epoch, GenerationState.LIVE, is_complete=False)
            case b"drop":
                for each in self._of(worker_id):
                    self.drop(each)
        if not self.position:
            self.origin = entry_id
        self.position = entry_id

    def check(self, scan: Scan) -> set[str]:
        """Ends a load, and compares the replica with the tree. `position` must be that of `scan`,
        which must be the last one of the load.

        Returns the ids of the workers that must be loaded again because their generation is missing
        or has another number of blocks.
        """
        assert self.position == scan.log
        for each in list(self._slots.values()):
            if each.state is GenerationState.LOADING:
                self._end_load(each)
        self.is_loaded = True
        self.origin = scan.origin
        self.has_unlogged = not all(worker.is_logged for worker in scan.workers)
        logged = {worker.worker_id: worker for worker in scan.workers if worker.is_logged}
        wrong = set(logged)
        for each in list(self._slots.values()):
            if each.state is not GenerationState.LIVE:
                continue
            worker = logged.get(each.worker_id)
            if worker is None or worker.epoch != each.epoch:
                self.drop(each)  # a script of an older version dropped the worker
                continue
            if self.table.count(each.slot) == worker.num_blocks:
                wrong.discard(each.worker_id)
            if worker.is_complete:
                self._complete(each.worker_id, each.epoch)
        return wrong

    def expire(self, now: float) -> None:
        """Drops the old generations that were used for `OLD_S` seconds."""
        for each in list(self._slots.values()):
            if each.state is GenerationState.OLD and now >= each.old_until:
                self.drop(each)

    def drop(self, generation: WorkerGeneration) -> None:
        """Drops a generation of this shard. Its slot can be used again when `sweep` has cleared the
        slot's bits."""
        slot = generation.slot
        del self._slots[slot]
        self._used &= ~(1 << slot)
        self._dropped |= 1 << slot
        others = self.generations[generation.worker_id]
        others.remove(generation)
        if not others:
            del self.generations[generation.worker_id]

    def sweep(self, num_parts: int) -> None:
        """Clears the bits of dropped slots in the next `num_parts` parts of the table."""
        if not self._sweeping:
            self._sweeping, self._dropped, self._part = self._dropped, 0, 0
            if not self._sweeping:
                return
        end = min(self._part + num_parts, NUM_PARTS)
        self.table.clear(self._sweeping, self._part, end)
        self._part = end
        if end == NUM_PARTS:
            self._sweeping = 0

    def _of(self, worker_id: str) -> list[WorkerGeneration]:
        """Returns the worker's generations in this shard."""
        return [each for each in self.generations.get(worker_id, ()) if each.shard is self]

    def _begin(self, worker_id: str, epoch: str, state: GenerationState, is_complete: bool) -> None:
        made = WorkerGeneration(self, worker_id, epoch, self._free_slot(), state, is_complete)
        self._slots[made.slot] = made
        self.generations.setdefault(worker_id, []).append(made)
        if state is GenerationState.LIVE:
            self._used |= 1 << made.slot

    def _free_slot(self) -> int:
        if not self._free_slots():
            self._sweep_all()
        if not self._free_slots():
            for each in list(self._slots.values()):
                if each.state is GenerationState.OLD:
                    self.drop(each)
            self._sweep_all()
        free = self._free_slots()
        # A shard has at most 31 workers, each with a live and a loading generation at most.
        assert free, "the replica of a shard has no free slot"
        return (free & -free).bit_length() - 1

    def _free_slots(self) -> int:
        taken = sum(1 << slot for slot in self._slots)
        return _ALL_SLOTS & ~(taken | self._dropped | self._sweeping)

    def _sweep_all(self) -> None:
        self.sweep(NUM_PARTS)  # ends the sweep that has begun
        self.sweep(NUM_PARTS)

    def _supersede(self, generation: WorkerGeneration, now: float) -> None:
        match generation.state:
            case GenerationState.LOADING:
                self.drop(generation)
            case GenerationState.LIVE:
                generation.state = GenerationState.OLD
                generation.old_until = now + OLD_S

    def _complete(self, worker_id: str, epoch: str) -> None:
        """Records that a worker's log is complete, and drops older generations."""
        for each in self._of(worker_id):
            if each.epoch == epoch and each.state is not GenerationState.OLD:
                each.is_complete = True
                if each.state is GenerationState.LIVE:
                    self._drop_old(worker_id)

    def _end_load(self, generation: WorkerGeneration) -> None:
        generation.state = GenerationState.LIVE
        self._used |= 1 << generation.slot
        if generation.is_complete:
            self._drop_old(generation.worker_id)
        for each in self._of(generation.worker_id):
            if each.state is GenerationState.OLD and each.epoch == generation.epoch:
                self.drop(each)

    def _drop_old(self, worker_id: str) -> None:
        for each in list(self.generations.get(worker_id, ())):
            if each.state is GenerationState.OLD:
                each.shard.drop(each)


def _rows(flat: Sequence[Any], width: int) -> Iterable[Sequence[Any]]:
    return (flat[at : at + width] for at in range(0, len(flat), width))


def _are_of_one_process(epoch: str, other: str) -> bool:
    """Returns whether two epochs PROCESS_EPOCH:COUNTER (publisher.py) are of one process."""
    process = epoch.rpartition(":")[0]
    return bool(process) and process == other.rpartition(":")[0]

"""A prefix tree in this process's memory, for the simulator and for tests.

Each worker has a slot, which is the number of a bit. For each block, the tree stores an integer,
the mask. Bit 3 of the mask is set if the worker in slot 3 holds the block. So a look-up costs the
same for one worker and for a thousand. Like lua/match.lua, the look-up probes the prompt's blocks
in growing steps (1, 2, 4, ...) and then searches between two probes. After a worker is dropped, its
slot cannot be reused until `sweep` has cleared the slot's bit in all masks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, count


@dataclass(slots=True)
class _Log:
    epoch: str
    slot: int
    next_sequence_number: int = 0
    num_blocks: int = 0


class MemoryIndex:
    """A `PrefixIndex` in memory.

    If `closed` is True, `match` assumes that a worker that holds a block also holds all earlier
    blocks of the prefix.
    """

    def __init__(self) -> None:
        self._logs: dict[str, _Log] = {}
        # block hash -> mask of the slots whose workers hold the block, and perhaps of dropped slots
        self._holders: dict[bytes, int] = {}
        self._worker_ids: list[str] = []  # item N is the id of the worker in slot N
        self._free_slots: list[int] = []
        self._live = 0  # mask of the slots in use
        self._dropped = 0  # mask of the dropped slots whose bits are not yet swept
        self._sweeping = 0  # mask of the dropped slots whose bits the current sweep clears
        self._unswept: Iterator[bytes] = iter(())

    async def reset(self, worker_id: str, epoch: str) -> None:
        await self.forget(worker_id)
        if self._free_slots:
            slot = self._free_slots.pop()
            self._worker_ids[slot] = worker_id
        else:
            slot = len(self._worker_ids)
            self._worker_ids.append(worker_id)
        self._live |= 1 << slot
        self._logs[worker_id] = _Log(epoch, slot)

    async def publish(
        self,
        worker_id: str,
        epoch: str,
        sequence_number: int,
        stored: Sequence[bytes],
        removed: Sequence[bytes],
        *,
        complete: bool = False,
    ) -> bool:
        log = self._logs.get(worker_id)
        if log is None or log.epoch != epoch or log.next_sequence_number != sequence_number:
            return False
        holders = self._holders
        bit = 1 << log.slot
        for block_hash in stored:
            mask = holders.get(block_hash, 0)
            if not mask & bit:
                holders[block_hash] = mask | bit
                log.num_blocks += 1
        for block_hash in removed:
            mask = holders.get(block_hash, 0)
            if mask & bit:
                _put(holders, block_hash, mask ^ bit)
                log.num_blocks -= 1
        log.next_sequence_number += 1
        return True

    async def match(self, block_hashes: Sequence[bytes], *, closed: bool = True) -> dict[str, int]:
        if not closed:
            return self._deepest(block_hashes)
        holders = self._holders
        count = len(block_hashes)
        depths: dict[str, int] = {}
        mask = self._live
        low = 0
        step = 1
        while mask:
            if low == count:
                self._report(mask, low, depths)
                break
            probe = min(low + step, count)
            deeper = mask & holders.get(block_hashes[probe - 1], 0)
            self._narrow(block_hashes, mask ^ deeper, low, probe, depths)
            mask = deeper
            low = probe
            step = step * 2
        return depths

    def _deepest(self, block_hashes: Sequence[bytes]) -> dict[str, int]:
        depths: dict[str, int] = {}
        mask = self._live
        for depth in range(len(block_hashes), 0, -1):
            found = mask & self._holders.get(block_hashes[depth - 1], 0)
            self._report(found, depth, depths)
            mask ^= found
            if not mask:
                break
        return depths

    async def forget(self, worker_id: str) -> None:
        log = self._logs.pop(worker_id, None)
        if log is not None:
            self._live ^= 1 << log.slot
            self._dropped |= 1 << log.slot

    async def num_blocks(self, worker_id: str) -> int:
        log = self._logs.get(worker_id)
        return log.num_blocks if log else 0

    async def sweep(self, limit: int) -> bool:
        if not self._sweeping:
            if not self._dropped:
                return False
            self._sweeping = self._dropped
            self._unswept = iter(list(self._holders))
        for _ in range(limit):
            block_hash = next(self._unswept, None)
            if block_hash is None:
                self._free_slots.extend(compress(count(), _flags(self._sweeping)))
                self._dropped ^= self._sweeping
                self._sweeping = 0
                return self._dropped != 0
            mask = self._holders.get(block_hash, 0)
            if mask & self._sweeping:
                _put(self._holders, block_hash, mask & ~self._sweeping)
        return True

    def _narrow(
        self, hashes: Sequence[bytes], mask: int, low: int, high: int, depths: dict[str, int]
    ) -> None:
        """Finds the depth of each worker in `mask` by binary search, and adds it to `depths`.

        The depth is the number of the prompt's leading blocks that the worker holds. For all
        workers in `mask`, it is at least `low` and less than `high`.
        """
        while mask and low:
            if high - low == 1:
                self._report(mask, low, depths)
                return
            middle = (low + high) // 2
            deeper = mask & self._holders.get(hashes[middle - 1], 0)
            self._narrow(hashes, deeper, middle, high, depths)
            mask = mask ^ deeper
            high = middle

    def _report(self, mask: int, depth: int, depths: dict[str, int]) -> None:
        if depth:
            depths.update(dict.fromkeys(compress(self._worker_ids, _flags(mask)), depth))


def _put(holders: dict[bytes, int], block_hash: bytes, mask: int) -> None:
    if mask:
        holders[block_hash] = mask
    else:
        del holders[block_hash]


_ZERO_IS_FALSE = bytes.maketrans(b"0", b"\0")


def _flags(mask: int) -> bytes:
    """Returns one byte for each bit of `mask`, the lowest bit first: zero for a clear bit, non-zero
    for a set bit.

    The function uses no Python loop, so it is fast even for 1,000 workers.
    """
    return bin(mask)[:1:-1].encode().translate(_ZERO_IS_FALSE)

"""The prefix tree in this process's memory: for the simulator and for tests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Log:
    epoch: str
    next_sequence_number: int = 0
    held: set[bytes] = field(default_factory=set)


class MemoryIndex:
    """A set of hashes per worker; as the sets are prefix-closed, a match is a bisection each."""

    def __init__(self) -> None:
        self._logs: dict[str, _Log] = {}

    async def reset(self, worker_id: str, epoch: str) -> None:
        self._logs[worker_id] = _Log(epoch)

    async def publish(
        self,
        worker_id: str,
        epoch: str,
        sequence_number: int,
        stored: Sequence[bytes],
        removed: Sequence[bytes],
    ) -> bool:
        log = self._logs.get(worker_id)
        if log is None or log.epoch != epoch or log.next_sequence_number != sequence_number:
            return False
        log.held.update(stored)
        log.held.difference_update(removed)
        log.next_sequence_number += 1
        return True

    async def match(self, block_hashes: Sequence[bytes]) -> dict[str, int]:
        depths = {
            worker_id: bisect_left(block_hashes, True, key=lambda h: h not in log.held)
            for worker_id, log in self._logs.items()
        }
        return {worker_id: depth for worker_id, depth in depths.items() if depth}

    async def forget(self, worker_id: str) -> None:
        self._logs.pop(worker_id, None)

    async def num_blocks(self, worker_id: str) -> int:
        log = self._logs.get(worker_id)
        return len(log.held) if log else 0

    async def sweep(self, limit: int) -> bool:
        return False

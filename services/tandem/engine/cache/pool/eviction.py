"""The order in which a pool evicts its unreferenced cached blocks: by rank, lowest first.

The pool adds only leaves (blocks without a cached child), so a rank need not consider chains. A
parent is added when its last child is evicted.
"""

import heapq
from typing import Generic, TypeVar

Rank = tuple[float, int]  # (worth, time of the last use)
_Id = TypeVar("_Id", int, bytes)  # blocks are named by id or by hash


class EvictionQueue(Generic[_Id]):
    """Blocks that may be evicted, ordered by rank. The queue is a heap with lazy deletion: `pop`
    skips outdated entries, and `add` removes them when they outnumber the valid ones."""

    def __init__(self) -> None:
        self._ranks: dict[_Id, Rank] = {}
        self._heap: list[tuple[Rank, _Id]] = []

    def __len__(self) -> int:
        return len(self._ranks)

    def rank(self, block_id: _Id) -> Rank | None:
        """Returns the rank of a block; None if the block is not in the queue."""
        return self._ranks.get(block_id)

    def add(self, block_id: _Id, rank: Rank) -> None:
        """Adds a block, or changes its rank."""
        self._ranks[block_id] = rank
        if len(self._heap) > 2 * len(self._ranks) + 64:
            self._heap = [(rank, block) for block, rank in self._ranks.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (rank, block_id))

    def discard(self, block_id: _Id) -> None:
        """Removes a block. Does nothing if it is not in the queue."""
        self._ranks.pop(block_id, None)

    def pop(self) -> _Id:
        """Removes and returns the block with the lowest rank. Raises IndexError if the queue is
        empty."""
        while True:
            rank, block_id = heapq.heappop(self._heap)
            if self._ranks.get(block_id) == rank:
                del self._ranks[block_id]
                return block_id

    def oldest(self) -> _Id | None:
        """Returns the block that `pop` would return; None if the queue is empty."""
        while self._heap:
            rank, block_id = self._heap[0]
            if self._ranks.get(block_id) == rank:
                return block_id
            heapq.heappop(self._heap)
        return None

    def block_ids(self) -> set[_Id]:
        """Returns all blocks in the queue."""
        return set(self._ranks)

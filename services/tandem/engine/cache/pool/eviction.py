"""The order in which a pool evicts its unreferenced cached blocks: by rank, the lowest first.

The pool offers only leaves (blocks with no cached child), so a rank never has to think of chains; a
parent is offered when its last child is gone.
"""

import heapq
from typing import Generic, TypeVar

Rank = tuple[float, int]  # worth, and time of the last use
_Id = TypeVar("_Id", int, bytes)  # of a block, or its hash


class EvictionQueue(Generic[_Id]):
    """A heap whose dead entries are skipped when they come up, and swept when they prevail."""

    def __init__(self) -> None:
        self._ranks: dict[_Id, Rank] = {}
        self._heap: list[tuple[Rank, _Id]] = []

    def __len__(self) -> int:
        return len(self._ranks)

    def rank(self, block_id: _Id) -> Rank | None:
        """Returns the rank of a block; None if it is not evictable."""
        return self._ranks.get(block_id)

    def add(self, block_id: _Id, rank: Rank) -> None:
        """The block became evictable, or has another rank now."""
        self._ranks[block_id] = rank
        if len(self._heap) > 2 * len(self._ranks) + 64:
            self._heap = [(rank, block) for block, rank in self._ranks.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (rank, block_id))

    def discard(self, block_id: _Id) -> None:
        """The block is not evictable any more; unknown ids are ignored."""
        self._ranks.pop(block_id, None)

    def pop(self) -> _Id:
        """Takes out the block to evict. Raises IndexError when there is none."""
        while True:
            rank, block_id = heapq.heappop(self._heap)
            if self._ranks.get(block_id) == rank:
                del self._ranks[block_id]
                return block_id

    def oldest(self) -> _Id | None:
        """Returns the block that `pop` would take out."""
        while self._heap:
            rank, block_id = self._heap[0]
            if self._ranks.get(block_id) == rank:
                return block_id
            heapq.heappop(self._heap)
        return None

    def block_ids(self) -> set[_Id]:
        """All that are evictable now."""
        return set(self._ranks)

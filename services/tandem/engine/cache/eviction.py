"""The order in which a pool evicts its unreferenced cached blocks: by rank, the lowest first.

The pool offers only leaves (blocks with no cached child), so a rank never has to think of chains; a
parent is offered when its last child is gone.
"""

import heapq

Rank = tuple[float, int]  # worth, and time of the last use


class EvictionQueue:
    """A heap whose dead entries are skipped when they come up, and swept when they prevail."""

    def __init__(self) -> None:
        self._ranks: dict[int, Rank] = {}
        self._heap: list[tuple[Rank, int]] = []

    def add(self, block_id: int, rank: Rank) -> None:
        """The block became evictable, or has another rank now."""
        self._ranks[block_id] = rank
        if len(self._heap) > 2 * len(self._ranks) + 64:
            self._heap = [(rank, block) for block, rank in self._ranks.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (rank, block_id))

    def discard(self, block_id: int) -> None:
        """The block is not evictable any more; unknown ids are ignored."""
        self._ranks.pop(block_id, None)

    def pop(self) -> int:
        """Takes out the block to evict. Raises IndexError when there is none."""
        while True:
            rank, block_id = heapq.heappop(self._heap)
            if self._ranks.get(block_id) == rank:
                del self._ranks[block_id]
                return block_id

    def oldest(self) -> int | None:
        """Returns the block that `pop` would take out."""
        while self._heap:
            rank, block_id = self._heap[0]
            if self._ranks.get(block_id) == rank:
                return block_id
            heapq.heappop(self._heap)
        return None

    def __bool__(self) -> bool:
        return bool(self._ranks)

    def block_ids(self) -> set[int]:
        """All that are evictable now."""
        return set(self._ranks)

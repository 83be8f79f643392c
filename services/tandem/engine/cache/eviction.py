"""The eviction policy: the order in which a pool evicts its unreferenced cached blocks.

The pool offers only leaves (blocks with no cached child), so the policy never has to think of
chains; a parent is offered when its last child is gone.
"""

import heapq


class LeastRecentlyUsed:
    """A heap whose dead entries are skipped when they come up, and swept when they prevail."""

    def __init__(self) -> None:
        self._last_used: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def add(self, block_id: int, last_used: int) -> None:
        """The block became evictable; `last_used` counts the pool's releases, higher is later."""
        self._last_used[block_id] = last_used
        if len(self._heap) > 2 * len(self._last_used) + 64:
            self._heap = [(used, block) for block, used in self._last_used.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (last_used, block_id))

    def discard(self, block_id: int) -> None:
        """The block is not evictable any more; unknown ids are ignored."""
        self._last_used.pop(block_id, None)

    def pop(self) -> int:
        """Takes out the block to evict. Raises IndexError when there is none."""
        while True:
            last_used, block_id = heapq.heappop(self._heap)
            if self._last_used.get(block_id) == last_used:
                del self._last_used[block_id]
                return block_id

    def oldest(self) -> int | None:
        """Returns the block that `pop` would take out."""
        while self._heap:
            last_used, block_id = self._heap[0]
            if self._last_used.get(block_id) == last_used:
                return block_id
            heapq.heappop(self._heap)
        return None

    def __bool__(self) -> bool:
        return bool(self._last_used)

    def block_ids(self) -> set[int]:
        """All that are evictable now."""
        return set(self._last_used)

"""The pool of a KV group with a sliding window. Its blocks have no parents, so any of them may go.

Evicted first are blocks that the window has passed, then the least recently used, and of one
sequence's the oldest position first: the last ones are those that a later request may go on from.
"""

from collections.abc import Sequence

from tandem.engine.cache.block_pool import BlockPool

_PASSED = 1 << 62  # before anything that was used when its sequence ended


class WindowPool(BlockPool):
    def release(self, block_table: Sequence[int]) -> None:
        """Drops one reference on each block of a table (given in the order of the chain)."""
        self._release_in_order(block_table, 0)

    def release_passed(self, block_ids: Sequence[int]) -> None:
        """Drops one reference on blocks that no later token of their sequence sees, in order."""
        self._release_in_order(block_ids, -_PASSED)

    def _release_in_order(self, block_ids: Sequence[int], offset: int) -> None:
        for block_id in block_ids:
            self._clock += 1
            self._drop_reference(block_id, offset + self._clock)

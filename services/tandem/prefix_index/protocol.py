"""The global prefix tree, which records the workers that hold each KV block.

The workers own the facts; the tree is a cache of them.
Each worker's events form a log with sequence numbers, parents before children. A batch is rejected
with False and changes nothing if its number is not the next one or its epoch is not the tree's. The
worker then takes a new epoch (`reset`) and publishes all its blocks again. So the tree is
prefix-closed for each worker: a worker that holds a block holds its parents. A match is a hint,
which the holder checks.
If a model has windows that free blocks, the events name the blocks after which a request can
continue, and the tree is not prefix-closed. `match` then looks for the deepest such block.
"""

from collections.abc import Sequence
from typing import Protocol


class PrefixIndex(Protocol):
    """Interface of a tree. All implementations pass the tests in tests/unit/prefix_index/."""

    async def reset(self, worker_id: str, epoch: str) -> None:
        """Forgets the worker's blocks and starts a log at sequence number 0 for `epoch`."""

    async def publish(
        self,
        worker_id: str,
        epoch: str,
        sequence_number: int,
        stored: Sequence[bytes],
        removed: Sequence[bytes],
    ) -> bool:
        """Applies one batch: stored blocks, parents first, then removed blocks, children first.

        Returns False for a gap, a repeat or another epoch; nothing has changed then.
        """

    async def match(self, block_hashes: Sequence[bytes], *, closed: bool = True) -> dict[str, int]:
        """Returns for each worker the number of leading blocks after which it can continue.

        Workers with none, and forgotten workers, are left out. It takes one round trip. `closed` is
        False for a model with windows, where an entry says only that a request can continue after
        that block.
        """

    async def forget(self, worker_id: str) -> None:
        """Drops a worker. It does not match again until its next `reset`."""

    async def num_blocks(self, worker_id: str) -> int:
        """Returns the number of blocks that the tree holds for the worker."""

    async def sweep(self, limit: int) -> bool:
        """Clears bits of dropped workers in at most `limit` entries; returns False if none are
        left.
        """

"""The global prefix tree, which records the workers that hold each KV block.

Only a worker knows for certain which blocks it holds; the tree may be a little out of date. So a
match is a hint, and the worker checks whether it still has the blocks.

The parent of a block is the block before it in the prompt. Each worker publishes its stored and
removed blocks as a log of numbered batches, in which parents are stored before their children. A
batch changes nothing if its number is not the next one, or if its epoch is not that of the worker's
log in the tree. The worker then starts a log under a new epoch (`reset`) and publishes all its
blocks again. So the tree is prefix-closed: if it lists a worker for a block, it lists the worker
for all earlier blocks of the prefix, too.

If a model has sliding-window attention, workers free blocks outside the window. They then publish
only the blocks after which a request can continue, and the tree is not prefix-closed. `match` looks
for the last such block of the prompt.
"""

from collections.abc import Sequence
from typing import Protocol


class PrefixIndex(Protocol):
    """Interface of a prefix tree. All implementations pass tests/unit/prefix_index/."""

    async def reset(self, worker_id: str, epoch: str) -> None:
        """Drops the worker's blocks and starts a new log under `epoch`, at sequence number 0."""

    async def publish(
        self,
        worker_id: str,
        epoch: str,
        sequence_number: int,
        stored: Sequence[bytes],
        removed: Sequence[bytes],
    ) -> bool:
        """Applies one batch of a worker's log: adds the worker to the `stored` blocks, then removes
        it from the `removed` blocks.

        In `stored`, parents precede children; in `removed`, children precede parents. Returns
        False, and changes nothing, if the sequence number is not the next one or the epoch is not
        the log's.
        """

    async def match(self, block_hashes: Sequence[bytes], *, closed: bool = True) -> dict[str, int]:
        """Returns, by worker, the number of leading blocks of a prompt that the worker need not
        compute.

        Workers without such blocks, and workers without a log, are left out. The call takes one
        round trip. `closed` must be False for a model with sliding-window attention. An entry then
        says only that a request can continue after the block, and not that the worker holds the
        blocks before it.
        """

    async def forget(self, worker_id: str) -> None:
        """Drops a worker, so that `match` leaves it out until its next `reset`."""

    async def num_blocks(self, worker_id: str) -> int:
        """Returns the number of blocks for which the tree lists the worker."""

    async def sweep(self, limit: int) -> bool:
        """Removes dropped workers from the next `limit` entries of the tree. When all entries are
        swept, the workers' slots can be used again.

        Returns False if nothing is left to sweep.
        """

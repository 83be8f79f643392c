"""The global prefix tree, which records the workers that hold each KV block.

Only a worker knows for certain which blocks it holds. The tree may be a little out of date. So a
match is a hint, and the worker checks whether it still holds the blocks.

Each worker publishes its stored and removed blocks as a log of numbered batches. A log has an
epoch, a string that identifies the log. The tree rejects a batch if its number is not the next
one, or if its epoch is not the epoch of the worker's log in the tree. The worker then starts a
new log with a new epoch (`reset`) and publishes all held blocks again.

The parent of a block is the block before it in the prompt. Parents are stored before their
children. So the tree is prefix-closed: if the tree lists a worker for a block, it also lists the
worker for all earlier blocks of the prefix.

If a model has sliding-window attention, workers free blocks outside the window. In this case,
workers publish only those blocks after which a request can continue, and the tree is not
prefix-closed. `match` looks for the last published block of the prompt.
"""

from collections.abc import Sequence
from typing import Protocol


class PrefixIndex(Protocol):
    """The interface of a prefix tree. All implementations pass the same tests
    (tests/unit/prefix_index/)."""

    async def reset(self, worker_id: str, epoch: str) -> None:
        """Drops the worker's blocks and starts a new log under `epoch`, at sequence number 0."""

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
        """Applies one batch of a worker's log: adds the worker to the `stored` blocks, then removes
        the worker from the `removed` blocks.

        In `stored`, parents precede children. In `removed`, children precede parents. Returns
        False, and changes nothing, if the sequence number is not the next one, or if `epoch` is not
        the epoch of the worker's log. `complete` is True if with this batch the log has all blocks
        that the worker holds. Replicas use the worker's previous log until then.
        """

    async def match(self, block_hashes: Sequence[bytes], *, closed: bool = True) -> dict[str, int]:
        """Returns worker id -> number of leading blocks of a prompt that the worker need not
        compute.

        A worker with the number 0 or without a log is left out. The call takes one round trip.
        `closed` must be False for a model with sliding-window attention, because the tree is then
        not prefix-closed: a worker that is listed for a block may not hold the blocks before it.
        """

    async def forget(self, worker_id: str) -> None:
        """Drops a worker. `match` leaves the worker out until `reset` is called for the worker."""

    async def num_blocks(self, worker_id: str) -> int:
        """Returns the number of blocks for which the tree lists the worker."""

    async def sweep(self, limit: int) -> bool:
        """Removes dropped workers from the next `limit` entries of the tree. When calls have
        reached all entries, other workers can use the slots of the dropped workers.

        Returns False if nothing is left to sweep.
        """

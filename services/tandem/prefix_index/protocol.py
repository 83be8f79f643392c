"""The global prefix tree: the workers that hold each KV block. A cache of facts the workers own.

Each worker's events are a log with sequence numbers, parents before children. A batch whose number
is not the next one, or of another epoch than the tree knows, is answered False and changes nothing:
the worker then takes a new epoch (`reset`) and publishes everything it holds again. So the tree is
prefix-closed for each worker: who holds a block holds its parents. A hit is a hint; holders check.

Of a model with windows that give back blocks, the events tell of the blocks after which a request
can go on, and the tree is not prefix-closed: `match` then looks for the deepest such block.
"""

from collections.abc import Sequence
from typing import Protocol


class PrefixIndex(Protocol):
    """Interface of a tree; all implementations pass the tests in tests/unit/prefix_index/."""

    async def reset(self, worker_id: str, epoch: str) -> None:
        """Forgets what the worker had and starts a log at sequence number 0 for `epoch`."""

    async def publish(
        self,
        worker_id: str,
        epoch: str,
        sequence_number: int,
        stored: Sequence[bytes],
        removed: Sequence[bytes],
    ) -> bool:
        """Applies one batch (stored, parents first, then removed, children first).

        True when applied. False for a gap, a repeat or another epoch: nothing changed.
        """

    async def match(self, block_hashes: Sequence[bytes], *, closed: bool = True) -> dict[str, int]:
        """Returns how many leading blocks each worker can go on from; workers with none are left
        out.

        One round trip. Only workers that were not forgotten count. `closed` False: the model has
        windows, and an entry says only that a request can go on after that block.
        """

    async def forget(self, worker_id: str) -> None:
        """Drops a worker: it never matches again until its next `reset`."""

    async def num_blocks(self, worker_id: str) -> int:
        """Returns how many blocks the tree holds for the worker."""

    async def sweep(self, limit: int) -> bool:
        """Does a part of the upkeep, on at most `limit` entries; False when none is left."""

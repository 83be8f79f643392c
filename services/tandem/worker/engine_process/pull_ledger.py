"""Tracks the local blocks into which a read over NIXL may still write bytes. As long as a read may
write into a block, the engine must not allocate the block to another sequence.

    1. `start`: a pull into a block begins. The block is unsafe from now on.
    2. `settled`: the pull has ended. After a successful pull, the block is safe again.
    3. `unfenced`: the pull has failed, but no read can write into the block any more. The block is
       safe again.

If a sequence ends (`give_up`) while some of its blocks are unsafe, these blocks are quarantined:
the engine does not allocate them until they are safe.

Only the engine's main thread uses this ledger. It gets the events of the transfer thread through a
queue. A block is in at most one unfinished pull, because an unsafe block is never allocated.
"""

from collections.abc import Iterable

from tandem.transfer.reads.messages import Pull, PullResult


class PullLedger:
    """Tracks pulls and the blocks that they may still write. Does no I/O."""

    def __init__(self) -> None:
        self._pulls: dict[str, tuple[str, list[int]]] = {}  # pull id -> (sequence id, local blocks)
        # unsafe block -> id of the sequence whose pull may still write it
        self._unsafe: dict[int, str] = {}
        self._quarantined: set[int] = set()  # unsafe blocks whose sequence has ended

    def start(self, sequence_id: str, pull: Pull) -> None:
        self._pulls[pull.pull_id] = (sequence_id, pull.local_block_ids)
        for block_id in pull.local_block_ids:
            assert block_id not in self._unsafe, f"block {block_id} is being written already"
            self._unsafe[block_id] = sequence_id

    def settled(self, result: PullResult) -> list[int]:
        """Removes a pull that ended; returns the blocks that leave quarantine."""
        _, block_ids = self._pulls.pop(result.pull_id, ("", []))
        return self.unfenced(block_ids) if result.done else []

    def unfenced(self, block_ids: Iterable[int]) -> list[int]:
        """Marks blocks as safe; returns those of them that leave quarantine."""
        released = []
        for block_id in block_ids:
            self._unsafe.pop(block_id, None)
            if block_id in self._quarantined:
                self._quarantined.discard(block_id)
                released.append(block_id)
        return released

    def give_up(self, sequence_id: str) -> tuple[list[str], list[int]]:
        """Gives up a sequence's blocks; returns (pulls to cancel, blocks to quarantine)."""
        pull_ids = [pull for pull, (owner, _) in self._pulls.items() if owner == sequence_id]
        unsafe = [block for block, owner in self._unsafe.items() if owner == sequence_id]
        unsafe = [block for block in unsafe if block not in self._quarantined]
        self._quarantined.update(unsafe)
        return pull_ids, unsafe

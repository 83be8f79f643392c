"""Tracks local blocks that a read may still write, which the engine may not hand out again.

    start ---- settled(done) --> safe
          `--- settled(failed) or give_up --> unsafe until `unfenced`, or a late `settled(done)`

The engine's main thread owns this ledger; the transfer thread's events reach it through a queue.
A block is in at most one outstanding pull, because an unsafe block is never allocated.
"""

from collections.abc import Iterable

from tandem.transfer.nixl.messages import Pull, PullResult


class PullLedger:
    """Follows pulls, purely. Each method returns what the caller must do to the engine."""

    def __init__(self) -> None:
        self._pulls: dict[str, tuple[str, list[int]]] = {}  # pull id -> sequence id, its blocks
        self._unsafe: dict[int, str] = {}  # block -> sequence whose read may still write it
        self._quarantined: set[int] = set()  # unsafe blocks whose sequence is gone

    def start(self, sequence_id: str, pull: Pull) -> None:
        self._pulls[pull.pull_id] = (sequence_id, pull.local_block_ids)
        for block_id in pull.local_block_ids:
            assert block_id not in self._unsafe, f"block {block_id} is being written already"
            self._unsafe[block_id] = sequence_id

    def settled(self, result: PullResult) -> list[int]:
        """Removes a pull that ended; returns the blocks to take out of quarantine now."""
        _, block_ids = self._pulls.pop(result.pull_id, ("", []))
        return self.unfenced(block_ids) if result.done else []

    def unfenced(self, block_ids: Iterable[int]) -> list[int]:
        """Nothing lands in these any more; answers those to take out of quarantine now."""
        released = []
        for block_id in block_ids:
            self._unsafe.pop(block_id, None)
            if block_id in self._quarantined:
                self._quarantined.discard(block_id)
                released.append(block_id)
        return released

    def give_up(self, sequence_id: str) -> tuple[list[str], list[int]]:
        """The sequence lets go of its blocks: pulls to cancel, and blocks that need quarantine."""
        pull_ids = [pull for pull, (owner, _) in self._pulls.items() if owner == sequence_id]
        unsafe = [block for block, owner in self._unsafe.items() if owner == sequence_id]
        unsafe = [block for block in unsafe if block not in self._quarantined]
        self._quarantined.update(unsafe)
        return pull_ids, unsafe

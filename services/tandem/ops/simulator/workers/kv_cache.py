"""A simulated worker's KV blocks: which are cached, which are held, which go first. Pure.

    free capacity --reserve--> private --store--> cached, held --release--> cached, idle --> evicted
                                   `--release--> free

Held blocks stay. Idle ones go leaf first, least lately used: a chain is put back with its leaf as
the oldest, so a block always goes before its parent.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Sequence


class SimulatedKvCache:
    """Blocks by hash. The last block of a prompt, when it is not full, is never cached."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._held = defaultdict[bytes, int](int)  # references
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # the first goes first
        self._num_private = 0

    @property
    def num_used(self) -> int:
        """Number of blocks that live sequences hold."""
        return len(self._held) + self._num_private

    def num_cached(self, block_hashes: Sequence[bytes]) -> int:
        """Returns how many leading blocks of the chain are here."""
        held = self._held
        idle = self._idle
        for depth, block_hash in enumerate(block_hashes):
            if block_hash not in held and block_hash not in idle:
                return depth
        return len(block_hashes)

    def reserve(self, cached: Sequence[bytes], num_private: int) -> list[bytes] | None:
        """Holds `cached`, which are here, and room for others; returns the blocks evicted for it.

        None when there is no room: nothing changed.
        """
        held = self._held
        idle = self._idle
        revived = [h for h in cached if h not in held]
        room = self.num_blocks - self.num_used - len(revived) - num_private
        if room < 0:
            return None
        for block_hash in cached:
            idle.pop(block_hash, None)
            held[block_hash] += 1
        self._num_private += num_private
        return [idle.popitem(last=False)[0] for _ in range(len(idle) - room)]

    def store(self, block_hashes: Sequence[bytes]) -> list[bytes]:
        """Names private blocks, which are held as before; returns those that are new here."""
        new = []
        for block_hash in block_hashes:
            if block_hash not in self._held and block_hash not in self._idle:
                new.append(block_hash)
            self._idle.pop(block_hash, None)
            self._held[block_hash] += 1
        self._num_private -= len(block_hashes)
        return new

    def release(self, block_hashes: Sequence[bytes], num_private: int) -> None:
        """Lets go of a chain (in its order) and of private blocks."""
        for block_hash in reversed(block_hashes):
            self._held[block_hash] -= 1
            if not self._held[block_hash]:
                del self._held[block_hash]
                self._idle[block_hash] = None
        self._num_private -= num_private

    def check_integrity(self) -> None:
        assert self._num_private >= 0
        assert self.num_used + len(self._idle) <= self.num_blocks
        assert not self._held.keys() & self._idle.keys()
        assert all(count > 0 for count in self._held.values())

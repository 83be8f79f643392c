"""Tracks the states of a simulated worker's KV blocks. Does no I/O.

States of a block, with the method that causes a transition in the arrow:

    free --reserve--> private --store--> cached and held --release--> cached and idle --> evicted
                          `--release--> free

Held blocks are not evicted. Idle blocks are evicted in LRU order. When the blocks of a prompt are
released, the last block counts as the oldest, so a block is always evicted before its parent.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Sequence


class SimulatedKvCache:
    """A KV cache by block hash. The last block of a prompt is not cached if it is not full."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._held = defaultdict[bytes, int](int)  # hash -> number of references
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # in the order of eviction
        self._num_private = 0

    @property
    def num_used(self) -> int:
        """Number of blocks that running sequences hold."""
        return len(self._held) + self._num_private

    def num_cached(self, block_hashes: Sequence[bytes]) -> int:
        """Returns how many leading blocks of a prompt, given by their hashes, are cached."""
        held = self._held
        idle = self._idle
        for depth, block_hash in enumerate(block_hashes):
            if block_hash not in held and block_hash not in idle:
                return depth
        return len(block_hashes)

    def reserve(self, cached: Sequence[bytes], num_private: int) -> list[bytes] | None:
        """Holds the blocks `cached`, which must be in the cache, and reserves `num_private` new
        blocks. Returns the hashes of the evicted blocks. If there is not enough room, returns None
        and changes nothing."""
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
        """Turns one private block for each hash into a cached block with that hash. The blocks stay
        held. Returns the hashes that were not cached before."""
        new = []
        for block_hash in block_hashes:
            if block_hash not in self._held and block_hash not in self._idle:
                new.append(block_hash)
            self._idle.pop(block_hash, None)
            self._held[block_hash] += 1
        self._num_private -= len(block_hashes)
        return new

    def release(self, block_hashes: Sequence[bytes], num_private: int) -> None:
        """Releases the cached blocks `block_hashes`, in the order of the prompt, and `num_private`
        private blocks."""
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

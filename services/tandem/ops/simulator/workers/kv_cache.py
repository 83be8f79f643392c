"""Tracks the KV blocks of a simulated worker. Does no I/O.

    state     meaning                                         next state (method)
    free      unused                                          private (`reserve`)
    private   belongs to one task, not in the cache           held (`store`), free (`release`)
    held      in the cache, used by one or several tasks      idle (`release` by the last task)
    idle      in the cache, used by no task                   held or free (`reserve`)

`reserve` evicts idle blocks if there are too few free ones, least recently used first. Of a
prompt's blocks, the last one is evicted first, because a cached block is useless without the blocks
before it.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Sequence


class SimulatedKvCache:
    """The KV blocks of one simulated worker, found by their hashes. If the last block of a prompt
    is not full, it has no hash and stays private."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._held = defaultdict[bytes, int](int)  # hash -> number of tasks that use the block
        # Hashes of the idle blocks, in the order in which they will be evicted.
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._num_private = 0

    @property
    def num_used(self) -> int:
        """Number of blocks that tasks use: private and held blocks."""
        return len(self._held) + self._num_private

    def num_cached(self, block_hashes: Sequence[bytes]) -> int:
        """Returns the number of leading blocks of a prompt that are in the cache. `block_hashes`
        are the hashes of the prompt's blocks."""
        held = self._held
        idle = self._idle
        for depth, block_hash in enumerate(block_hashes):
            if block_hash not in held and block_hash not in idle:
                return depth
        return len(block_hashes)

    def room(self, cached: Sequence[bytes]) -> int:
        """Returns the largest `num_private` with which `reserve` would succeed."""
        revived = sum(block_hash not in self._held for block_hash in cached)
        return self.num_blocks - self.num_used - revived

    def reserve(self, cached: Sequence[bytes], num_private: int) -> list[bytes] | None:
        """Gives a task the blocks with the hashes `cached`, which must be in the cache, and
        `num_private` new private blocks. Returns the hashes of the blocks that were evicted to make
        room. If there are too few free and idle blocks, returns None and changes nothing."""
        held = self._held
        idle = self._idle
        room = self.room(cached) - num_private
        if room < 0:
            return None
        for block_hash in cached:
            idle.pop(block_hash, None)
            held[block_hash] += 1
        self._num_private += num_private
        return [idle.popitem(last=False)[0] for _ in range(len(idle) - room)]

    def store(self, block_hashes: Sequence[bytes]) -> list[bytes]:
        """Turns one private block for each hash into a held block, which can then be found by the
        hash. Returns the hashes that were not in the cache before."""
        new = []
        for block_hash in block_hashes:
            if block_hash not in self._held and block_hash not in self._idle:
                new.append(block_hash)
            self._idle.pop(block_hash, None)
            self._held[block_hash] += 1
        self._num_private -= len(block_hashes)
        return new

    def release(self, block_hashes: Sequence[bytes], num_private: int) -> None:
        """Releases a task's held blocks `block_hashes` (in the order of the prompt) and
        `num_private` private blocks."""
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

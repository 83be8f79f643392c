"""The pinned blocks of a pool, which are evicted after all others. A tenant pins blocks until a
given time.

    pin --> pinned --the pin's time is over--> EXPIRED
                |--a new tenant makes the tenant's share smaller--> TRIMMED
                `--no unpinned block is left to evict--> EVICTED

A tenant may pin no more blocks than its share of the capacity. Shares are in proportion to the
weights of the tenants that have pins: with a capacity of 300 blocks, tenants of weight 1 and 2 may
pin 100 and 200 blocks. A pin reserves no room: if nothing else can be evicted, pinned blocks
without references are evicted. So pins delay no request.

A chain of blocks is pinned from its first block on, and no block stays pinned longer than the
blocks before it. So the last blocks of a chain lose their pins first, and all blocks before a
pinned block are pinned too. This module knows the hashes of blocks, but not the pool. Times are in
seconds of the caller's clock.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from tandem.engine.cache.pool.eviction import EvictionQueue


class Fate(Enum):
    """The result of a request to pin a block (PINNED or REFUSED), or the reason why a pin ended
    (EXPIRED, TRIMMED or EVICTED)."""

    PINNED = "pinned"
    REFUSED = "refused"  # not pinned, because the tenant's share is used up
    EXPIRED = "expired"
    TRIMMED = "trimmed"
    EVICTED = "evicted"


@dataclass(slots=True)
class _Tenant:
    weight: int
    blocks: EvictionQueue[bytes] = field(default_factory=EvictionQueue)


class Pins:
    def __init__(self, capacity: int) -> None:
        """`capacity` is the largest number of pinned blocks."""
        self.capacity = capacity
        self.fates: Counter[Fate] = Counter()  # number of blocks by their fate, since the start
        self._tenants: dict[bytes, _Tenant] = {}  # tenants that have pins
        self._owner: dict[bytes, bytes] = {}  # the tenant that pinned each block, by block hash
        self._changed: dict[bytes, None] = {}
        self._next_end = float("inf")  # the earliest time at which a pin may expire

    def __len__(self) -> int:
        return len(self._owner)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._owner

    def share(self, tenant: bytes, weight: int) -> int:
        """Returns how many blocks a tenant of this weight may pin. The other tenants that have pins
        share the capacity with it."""
        others = sum(each.weight for name, each in self._tenants.items() if name != tenant)
        return self.capacity * weight // (others + weight)

    def count(self, tenant: bytes) -> int:
        """Returns the number of blocks that a tenant has pinned."""
        return len(self._tenants[tenant].blocks) if tenant in self._tenants else 0

    def pin(self, tenant: bytes, weight: int, chain: Sequence[bytes], until: float) -> int:
        """Pins blocks for a tenant until the time `until`, as far as the tenant's share allows.

        `chain` has the block hashes of a chain from its first block on. Returns how many leading
        blocks of the chain are now pinned until this time or longer.
        """
        share = self.share(tenant, weight)
        if not share or not chain:
            self.fates[Fate.REFUSED] += len(chain)
            return 0
        own = self._tenants.setdefault(tenant, _Tenant(weight))
        own.weight = weight
        for name in list(self._tenants):
            self._trim(name)
        self._next_end = min(self._next_end, until)
        for index, block_hash in enumerate(chain):
            rank = own.blocks.rank(block_hash)
            if rank is None:
                if len(own.blocks) >= share:
                    self.fates[Fate.REFUSED] += len(chain) - index
                    return index
                self.fates[Fate.PINNED] += 1
                self._owner[block_hash] = tenant
                self._changed[block_hash] = None
            if rank is None or rank[0] < until:
                own.blocks.add(block_hash, (until, -index))
        return len(chain)

    def are_due(self, now: float) -> bool:
        """Returns whether a pin may have expired."""
        return now >= self._next_end

    def expire(self, now: float) -> None:
        """Ends the pins that have expired."""
        self._next_end = float("inf")
        for name in list(self._tenants):
            blocks = self._tenants[name].blocks
            while (first := blocks.oldest()) is not None:
                rank = blocks.rank(first)
                assert rank is not None
                if rank[0] > now:
                    self._next_end = min(self._next_end, rank[0])
                    break
                self._end(first, Fate.EXPIRED)

    def forget(self, block_hash: bytes) -> None:
        """Records that a pinned block was evicted."""
        self._end(block_hash, Fate.EVICTED)

    def take_changed(self) -> list[bytes]:
        """Returns the hashes of the blocks that were pinned or unpinned since the last call."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def check(self) -> None:
        """Raises AssertionError if a tenant exceeds its share or the counts are inconsistent."""
        for name, tenant in self._tenants.items():
            num = len(tenant.blocks)
            share = self.share(name, tenant.weight)
            assert 0 < num <= share, f"a tenant has {num} pins, and its share is {share}"
        counted = sum(len(tenant.blocks) for tenant in self._tenants.values())
        assert counted == len(self._owner), f"{len(self._owner)} are pinned, tenants have {counted}"

    def _trim(self, name: bytes) -> None:
        """Ends pins of a tenant until the tenant has no more than its share. The pins that expire
        first are ended first."""
        tenant = self._tenants[name]
        share = self.share(name, tenant.weight)
        while len(tenant.blocks) > share:
            first = tenant.blocks.oldest()
            assert first is not None
            self._end(first, Fate.TRIMMED)

    def _end(self, block_hash: bytes, fate: Fate) -> None:
        name = self._owner.pop(block_hash)
        blocks = self._tenants[name].blocks
        blocks.discard(block_hash)
        if not blocks:
            del self._tenants[name]
        self._changed[block_hash] = None
        self.fates[fate] += 1

"""Pins chains of blocks that clients want to reuse, so that these blocks are evicted last. Blocks
are pinned when a sequence ends or a router requests it, until a given time (cache/pool/pins.py).

In the KV pools only cached blocks can be pinned. In a tier all blocks of the chain are pinned, even
those that are not in the tier yet, because they may be about to be written to it.
"""

import time
from collections import Counter
from collections.abc import Sequence

from tandem.common.retention import Kept, Retention
from tandem.engine.cache.kv_cache import KvCache
from tandem.engine.cache.pool.block_pool import BlockPool
from tandem.engine.cache.pool.pins import Fate
from tandem.engine.tiers.slots.slot_pool import SlotPool
from tandem.engine.tiers.tiers import Tiers
from tandem.engine.types import PinStats


class KeptChains:
    def __init__(self, kv: KvCache, tiers: Tiers, share: float) -> None:
        """`share` is the fraction of each pool and tier that may be pinned, 0 to 1."""
        self._kv = kv
        self._tiers = tiers
        self.clock = time.monotonic
        self._pools: dict[str, list[BlockPool]] = {"device": kv.pools}
        self._pools |= {
            tier.storage.name: [group.pool for group in tier.groups] for tier in tiers.tiers
        }
        self._all_pools = [pool for pools in self._pools.values() for pool in pools]
        for pool in self._all_pools:
            pool.pins.capacity = int(share * pool.num_blocks)

    def keep(self, tenant: bytes, retention: Retention, block_hashes: Sequence[bytes]) -> Kept:
        """Pins the blocks of a chain for `retention.pin_s` seconds. Pins fewer blocks if the tenant
        would exceed its share of the pinned blocks.

        If `retention.num_tokens` is not 0, only the full blocks within the first `num_tokens`
        tokens are pinned. `tenant` is the salt of the block hashes. The result has the number of
        leading blocks after which a request can resume as long as the pins last.

        In a model with sliding windows, a request that continues the chain needs the chain's last
        blocks from the pool of each window. This method also marks these blocks to be copied to the
        tiers.
        """
        self._kv.want_copies(block_hashes)
        if retention.num_tokens:
            block_hashes = block_hashes[: retention.num_tokens // self._kv.layout.block_size]
            self._kv.want_copies(block_hashes)
        if not retention.pin_s or not block_hashes:
            return Kept(0)
        until = self.clock() + retention.pin_s
        depth = len(block_hashes)
        is_refused = False
        for group, pool in zip(self._kv.layout.groups, self._kv.pools, strict=True):
            if group.window is None:
                cached = list(block_hashes[: len(pool.match(block_hashes))])
            else:
                cached = [h for h in block_hashes[:depth] if pool.find(h) is not None]
            if group.has_states:
                # A request that continues the chain needs the last state alone.
                cached = cached[-1:]
            num_pinned = pool.pin(tenant, retention.weight, cached, until)
            is_refused |= num_pinned < len(cached)
            if group.window is None:
                depth = min(depth, num_pinned)
        depth = self._kv.layout.deepest_hit(block_hashes, depth, self._is_pinned)
        resume = len(block_hashes) * self._kv.layout.block_size
        for tier in self._tiers.tiers:
            for number, (group, slots) in enumerate(
                zip(self._kv.layout.groups, tier.groups, strict=True)
            ):
                seen = block_hashes[group.first_seen(resume) :]
                if group.has_states:
                    seen = self._last_state(number, slots.pool, block_hashes)
                slots.pool.pin(tenant, retention.weight, seen, until)
        if is_refused:
            share = self._kv.pools[0].pins.share(tenant, retention.weight)
            return Kept(depth, f"the tenant may protect at most {share} blocks from eviction")
        if depth == len(block_hashes):
            return Kept(depth)
        if self._kv.has_states:
            return Kept(depth, "no state is kept after any of the other blocks")
        return Kept(depth, "the other blocks are no longer cached")

    def _last_state(
        self, group: int, slots: SlotPool, block_hashes: Sequence[bytes]
    ) -> list[bytes]:
        """Returns the hash of the last block of a chain after which the group's pool or a tier has
        a state. Empty if there is none."""
        pool = self._kv.pools[group]
        return next(
            ([h] for h in reversed(block_hashes) if slots.has(h) or pool.find(h) is not None), []
        )

    def _is_pinned(self, group: int, block_hash: bytes) -> bool:
        pool = self._kv.pools[group]
        return pool.find(block_hash) is not None and block_hash in pool.pins

    def expire(self) -> None:
        """Ends the pins that have expired."""
        now = self.clock()
        for pool in self._all_pools:
            pool.expire_pins(now)

    def stats(self) -> list[PinStats]:
        """Returns one item for all KV pools together, and one for each tier. Pools or tiers that
        never had a pin are left out."""
        found = []
        for place, pools in self._pools.items():
            if any(pool.pins.fates for pool in pools):
                fates = sum((pool.pins.fates for pool in pools), Counter[Fate]())
                num_pinned = sum(len(pool.pins) for pool in pools)
                found.append(PinStats(place, num_pinned, {f.value: fates[f] for f in Fate}))
        return found

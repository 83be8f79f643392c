"""Hits of a host tier under an agents' trace, by policy and size, without a model.

    python -m benchmarks.tiers.policies [--requests 400] [--seed 0]

The device's pool holds a tenth of the trace's working set (agents_trace.py). The pool, the tier and
its policies are the engine's own; blocks have one byte, and an infinite cache is an infinite tier.
With pins, a session's prompt is pinned for a minute, in the pool and in the tier, while its tool
runs. With the policy `priority`, requests of sessions have the highest one, and others the default.
Beside them stands LMCache's policy: whole chunks of 256 tokens, all of which are taken, and
the least recently used of which is evicted. Writes benchmarks/results/tier_policies.json.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmarks.simulator.agents_trace import BLOCK, Request, Trace
from tandem.common.retention import PRIORITY_DEFAULT, PRIORITY_MAX
from tandem.engine.cache.block_table import UnfilledBlocks
from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.cache.pool.block_pool import BlockPool
from tandem.engine.tiers.device.blocks import BlocksInPlace
from tandem.engine.tiers.host import HostStorage
from tandem.engine.tiers.slots.keep_policy import keep_policy
from tandem.engine.tiers.tier import Tier
from tandem.engine.tiers.tiers import Tiers
from tandem_bench.framework import RESULTS, Report, options, run_main

DEVICE = 0.1  # of the working set
SIZES = (0.25, 0.5, 1.0)  # of a tier, in working sets
PIN_S, PIN_SHARE = 60.0, 0.5
CHUNK = 256 // BLOCK  # blocks, as LMCache 0.5.6 has them by default


@dataclass(frozen=True)
class Policy:
    name: str  # of --kv-tier-policy
    knows_sessions: bool = False
    pins: bool = False  # what waits for a tool


POLICIES = {
    "lru": Policy("lru"),
    "prefix": Policy("prefix"),
    "value": Policy("value"),
    "lru, pins": Policy("lru", pins=True),
    "value, sessions": Policy("value", knows_sessions=True),
    "value, sessions, pins": Policy("value", knows_sessions=True, pins=True),
    "priority, sessions": Policy("priority", knows_sessions=True),
}


class InCall:
    """Runs a job as it is submitted."""

    def submit(self, job: Callable[[], object]) -> None:
        job()

    def close(self, deadline_s: float) -> None:
        pass


class LowerTier(Protocol):
    def depth(self, hashes: list[bytes]) -> int:
        """Returns how many first blocks it has."""

    def load(self, request: Request, first: int, table: list[int]) -> None:
        """Gives blocks from `first` on."""

    def take(self, request: Request) -> None:
        """The request is computed, and its blocks are referenced still."""

    def settle(self) -> None:
        """Lets it write what it wants to."""

    def check(self) -> None:
        """Raises AssertionError if its books are wrong."""


class OwnTier:
    """A tier of the engine's with its policies."""

    def __init__(self, pool: BlockPool, num_slots: int, policy: Policy) -> None:
        blocks = BlocksInPlace(np.zeros((pool.num_blocks, 1), np.uint8))
        storage = HostStorage(blocks.host_pages(num_slots), block_bytes=1)
        layout = KvLayout.of_one(BlockLayout(pool.num_blocks, 1, 1, BLOCK, 1, "int8"))
        tier = Tier(0, [storage], keep_policy(policy.name, num_slots, BLOCK), layout)
        self._tiers = Tiers([pool], layout, [blocks], [tier], lambda _: InCall())
        self._tiers.turn_s = 0.0  # one block in each turn: the results depend on no clock
        self._policy = policy
        self._pools = (pool, tier.pool)
        for each in self._pools:
            each.pins.capacity = int(PIN_SHARE * each.num_blocks)

    def depth(self, hashes: list[bytes]) -> int:
        return self._tiers.reach(hashes)[0].num_blocks

    def load(self, request: Request, first: int, table: list[int]) -> None:
        end = first + len(table)
        wanted = UnfilledBlocks(0, range(first, end), table)
        self._tiers.load("", request.blocks[:end], [wanted])
        self._tiers.take_ended()

    def take(self, request: Request) -> None:
        returns = self._policy.knows_sessions and request.in_session
        priority = PRIORITY_MAX if returns else PRIORITY_DEFAULT
        self._tiers.use(request.blocks, keep=returns, priority=priority)
        for pool in self._pools:
            pool.expire_pins(request.at)
            if self._policy.pins and request.calls_tool:
                pool.pin(b"", 1, request.blocks, request.at + PIN_S)

    def settle(self) -> None:
        while self._tiers.has_results:
            self._tiers.settle()
            self._tiers.write()
            self._tiers.take_events()

    def check(self) -> None:
        self._tiers.check_integrity()


class ChunkTier:
    """LMCache's: whole chunks by the hash of their last block. Those of a request that were there
    are touched from its last one to its first one; a new one is the most recently used."""

    def __init__(self, num_slots: int) -> None:
        self._num_chunks = num_slots // CHUNK
        self._chunks: OrderedDict[bytes, None] = OrderedDict()

    def depth(self, hashes: list[bytes]) -> int:
        names = hashes[CHUNK - 1 :: CHUNK]
        found = next((i for i, name in enumerate(names) if name not in self._chunks), len(names))
        return found * CHUNK

    def load(self, request: Request, first: int, table: list[int]) -> None:
        pass

    def take(self, request: Request) -> None:
        names = request.blocks[CHUNK - 1 :: CHUNK]
        for name in reversed(names[: self.depth(request.blocks) // CHUNK]):
            self._chunks.move_to_end(name)
        for name in names:
            self._chunks.setdefault(name)
            if len(self._chunks) > self._num_chunks:
                self._chunks.popitem(last=False)

    def settle(self) -> None:
        pass

    def check(self) -> None:
        assert len(self._chunks) <= self._num_chunks


def hits(requests: list[Request], pool: BlockPool, tier: LowerTier) -> tuple[float, float]:
    """Returns the share of blocks that were not computed, and of those that were in the pool."""
    num_hits = num_here = num_asked = 0
    for request in requests:
        hashes = request.blocks
        here = len(pool.match(hashes))
        depth = max(here, tier.depth(hashes))
        found = pool.reserve(hashes[:here], len(hashes))
        assert found is not None
        table = found.block_table
        if depth > here:
            tier.load(request, here, table[here:depth])
        for i in range(here, len(hashes)):
            table[i] = pool.store(
                table[i],
                parent_id=table[i - 1] if i else None,
                parent_hash=hashes[i - 1] if i else b"",
                block_hash=hashes[i],
            )
        tier.take(request)
        pool.release(table)
        tier.settle()
        num_hits += depth
        num_here += here
        num_asked += len(hashes)
    pool.check_integrity([])
    tier.check()
    return num_hits / num_asked, num_here / num_asked


@options
class Options:
    requests: int = 400
    seed: int = 0
    output: Path = RESULTS / "tier_policies.json"


def main(args: Options = Options()) -> None:
    report = Report(args.output)
    trace = Trace(args.seed)
    requests = list(trace.requests(args.requests))
    num_blocks = max(int(DEVICE * trace.working_set), max(len(r.blocks) for r in requests) + 64)
    all_blocks = len({b for request in requests for b in request.blocks})

    def own(size: int, policy: Policy) -> tuple[float, float]:
        pool = BlockPool(num_blocks)
        return hits(requests, pool, OwnTier(pool, size, policy))

    infinite, _ = own(all_blocks, POLICIES["lru"])
    results = {"requests": len(requests), "seed": args.seed, "working_set": trace.working_set}
    results |= {"device": num_blocks, "blocks": all_blocks, "infinite": infinite}
    print(json.dumps(results), flush=True)
    sizes = {size: int(size * trace.working_set) for size in SIZES}
    rows: dict[str, dict[str, float]] = {}
    in_pool: dict[str, dict[str, float]] = {}
    for name in (*POLICIES, "LMCache"):
        rows[name], in_pool[name] = {}, {}
        for size, slots in sizes.items():
            if name in POLICIES:
                share, here = own(slots, POLICIES[name])
            else:
                share, here = hits(requests, BlockPool(num_blocks), ChunkTier(slots))
            rows[name][str(size)], in_pool[name][str(size)] = share, here
            print(
                f"{name}, {size}: {share / infinite:.3f} of an infinite cache's hits,"
                f" {here / infinite:.3f} in the pool",
                flush=True,
            )
    report.write(**results, hits=rows, in_pool=in_pool)


if __name__ == "__main__":
    run_main(main)

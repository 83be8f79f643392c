"""Blocks that leave the pool without a copy, by what starts the writes to a tier.

    python -m benchmarks.tiers.drops [--requests 300] [--seed 0] [--at-once 8] [--rates 0 8]

Requests of the agents' trace (agents_trace.py) run some at a time: a step computes up to 32 blocks,
and each answer takes 30 steps. The pool, the tier and its policies are the engine's own, without
bytes, and the tier writes so many blocks in a step (0: all at once). Three ways are compared:

    full    blocks are written when they are full or used again, in this order: the engine's way
    rescue  as full; and while less than a part of the pool is free or has a copy, the coldest
            unreferenced leaves that no tier has are offered again, with the blocks before them
    cold    as full; but below that mark the chain of the coldest leaf that waits is written first

A block is wanted if the policy would take it, and missed if a later request asks for it. Loads take
no time. Writes benchmarks/results/tier_drops.json.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.simulator.agents_trace import BLOCK, Request, Trace
from benchmarks.tiers.policies import InCall
from tandem.common.retention import PRIORITY_DEFAULT
from tandem.engine.cache.block_table import UnfilledBlocks
from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.cache.pool.block import Copy
from tandem.engine.cache.pool.block_pool import BlockPool
from tandem.engine.tiers.device.blocks import BlocksInPlace
from tandem.engine.tiers.host import HostStorage
from tandem.engine.tiers.io_thread import JobThread
from tandem.engine.tiers.slots.keep_policy import KeepPolicy, keep_policy
from tandem.engine.tiers.tier import Tier
from tandem.engine.tiers.tiers import Tiers
from tandem_bench.framework import RESULTS, Report, options, run_main

STEP_BLOCKS = 32  # that a step computes
ANSWER_STEPS = 30
TURNS = 32  # of the tiers, of a block each, in a step
LEAVES = 2  # that are offered again in a step
WAYS = ("full", "rescue", "cold")
POLICIES = ("lru", "value", "value, sessions")


class Pool(BlockPool):
    """Counts what it drops, and may ask for writes below a mark."""

    def __init__(self, num_blocks: int, policy: KeepPolicy, way: str, mark: float) -> None:
        super().__init__(num_blocks)
        self._policy = policy
        self._way = way
        self._num_low = mark * num_blocks
        self._tried: set[int] = set()  # since their last use
        self.is_asked_later: Callable[[bytes], bool] = lambda _: False
        self.num_wanted = 0
        self.num_missed = 0

    @property
    def next_unwritten(self) -> int | None:
        block_id = self._cached.oldest(Copy.NONE) if self._way == "cold" and self._is_low else None
        if block_id is None:
            return super().next_unwritten
        while (parent := self._blocks[block_id].parent_id) is not None:
            if parent not in self._unwritten:
                break
            block_id = parent
        return block_id

    def rescue(self) -> None:
        """Offers the coldest leaves without a copy again, each once after a use."""
        if self._way != "rescue" or not self._is_low:
            return
        lost = (
            number
            for number, block in enumerate(self._blocks)
            if block.copy is Copy.LOST
            and not (block.num_references or block.num_children or number in self._tried)
        )
        for leaf in sorted(lost, key=lambda number: self._blocks[number].last_used)[:LEAVES]:
            self._tried.add(leaf)
            for block_id in self.chain(leaf):
                block_hash, _ = self.hashes_of(block_id)
                if self._blocks[block_id].copy is Copy.LOST and self._policy.takes(block_hash):
                    self._set_copy(block_id, Copy.NONE)
                    self._unwritten[block_id] = None

    @property
    def _is_low(self) -> bool:
        return self.num_free + self._cached.num(Copy.COMPLETE) < self._num_low

    def _reference(self, block_ids: Iterable[int]) -> None:
        block_ids = list(block_ids)
        self._tried.difference_update(block_ids)
        super()._reference(block_ids)

    def _evict(self) -> Copy:
        leaves = next(each for half in self._cached._leaves for each in half.values() if each)
        leaf = leaves.oldest()
        assert leaf is not None
        block_hash, _ = self.hashes_of(leaf)
        self._tried.discard(leaf)
        copy = super()._evict()
        if copy in (Copy.NONE, Copy.LOST):
            self.num_wanted += self._policy.takes(block_hash)
            self.num_missed += self.is_asked_later(block_hash)
        return copy


class Writer:
    """Runs so many jobs in a step, of a block each; 0: all of them."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._jobs: deque[Callable[[], object]] = deque()

    def submit(self, job: Callable[[], object]) -> None:
        self._jobs.append(job)

    def close(self, deadline_s: float) -> None:
        """Does nothing."""

    def step(self) -> None:
        for _ in range(min(len(self._jobs), self._rate or len(self._jobs))):
            self._jobs.popleft()()


@dataclass
class Running:
    """A request that was admitted."""

    request: Request
    table: list[int]
    num_stored: int = 0
    steps_left: int = ANSWER_STEPS


class Replay:
    """Plays requests on a pool with one tier."""

    def __init__(self, pool: Pool, num_slots: int, policy: KeepPolicy, args: Args) -> None:
        blocks = BlocksInPlace(np.zeros((pool.num_blocks, 1), np.uint8))
        storage = HostStorage(blocks.host_pages(num_slots), block_bytes=1)
        layout = KvLayout.of_one(BlockLayout(pool.num_blocks, 1, 1, BLOCK, 1, "int8"))
        self._pool, self._args = pool, args
        self._writer = Writer(args.rate)
        self._tier = Tier(0, [storage], policy, layout)
        self._tiers = Tiers([pool], layout, [blocks], [self._tier], self._start_thread)
        self._tiers.turn_s = 0.0  # one block in each turn: the results depend on no clock
        self._tiers.clock = lambda: 0.0
        self._running: list[Running] = []
        self._num_hits = self._num_asked = 0

    def run(self, requests: Sequence[Request]) -> dict[str, float]:
        """Returns the share of blocks that were not computed, and what was dropped and written."""
        last = {block: n for n, request in enumerate(requests) for block in request.blocks}
        waiting = deque(enumerate(requests))
        while waiting or self._running:
            while waiting and len(self._running) < self._args.at_once:
                number, request = waiting[0]
                if not self._admit(str(number), request):
                    break
                waiting.popleft()
                self._pool.is_asked_later = lambda block, now=number: last[block] > now
            self._step()
        self._pool.check_integrity([])
        return {
            "hits": self._num_hits / self._num_asked,
            "dropped": self._pool.num_dropped,
            "wanted": self._pool.num_wanted,
            "missed": self._pool.num_missed,
            "written": self._tier.num_written,
        }

    def _admit(self, name: str, request: Request) -> bool:
        hashes = request.blocks
        here = len(self._pool.match(hashes))
        depth = max(here, self._tiers.reach(hashes)[0].num_blocks)
        found = self._pool.reserve(hashes[:here], len(hashes))
        if found is None:
            return False
        running = Running(request, found.block_table, here)
        if depth > here:
            wanted = UnfilledBlocks(0, range(here, depth), running.table[here:depth])
            self._tiers.load(name, hashes[:depth], [wanted])
            self._tiers.take_ended()
        self._use(running, 0, here)
        self._store(running, depth)
        self._running.append(running)
        self._num_hits += depth
        self._num_asked += len(hashes)
        return True

    def _step(self) -> None:
        budget = STEP_BLOCKS
        for running in list(self._running):
            first, end = running.num_stored, len(running.request.blocks)
            if first < end:
                self._store(running, min(end, first + budget))
                budget -= running.num_stored - first
                continue
            running.steps_left -= 1
            if not running.steps_left:
                self._pool.release(running.table)
                self._running.remove(running)
        self._pool.rescue()
        for _ in range(TURNS):
            if not self._tiers.has_results:
                break
            self._tiers.settle()
            self._tiers.write()
            self._tiers.take_events()
        self._writer.step()

    def _store(self, running: Running, end: int) -> None:
        hashes, table, first = running.request.blocks, running.table, running.num_stored
        for i in range(first, end):
            table[i] = self._pool.store(
                table[i],
                parent_id=table[i - 1] if i else None,
                parent_hash=hashes[i - 1] if i else b"",
                block_hash=hashes[i],
            )
        running.num_stored = end
        self._use(running, first, end)

    def _use(self, running: Running, first: int, end: int) -> None:
        keep = self._args.knows_sessions and running.request.in_session
        used = running.request.blocks[first:end]
        self._tiers.use(used, keep=keep, priority=PRIORITY_DEFAULT)

    def _start_thread(self, name: str) -> JobThread:
        return self._writer if name.endswith("writes") else InCall()


@dataclass(frozen=True)
class Args:
    at_once: int  # requests
    rate: int  # blocks written in a step; 0: all
    knows_sessions: bool


@options
class Options:
    requests: int = 300
    seed: int = 0
    at_once: tuple[int, ...] = (8,)
    """Requests at once."""
    rates: tuple[int, ...] = (0, 8)
    """Blocks that the tier writes in a step; 0: all."""
    sizes: tuple[float, ...] = (0.25, 1.0)
    """Sizes of the tier, in working sets."""
    mark: float = 0.5
    """Share of the pool below which blocks are offered again."""
    policies: tuple[Literal[POLICIES], ...] = POLICIES[:2]
    ways: tuple[Literal[WAYS], ...] = WAYS
    output: Path = RESULTS / "tier_drops.json"


def main(args: Options = Options()) -> None:
    report = Report(args.output)
    trace = Trace(args.seed)
    requests = list(trace.requests(args.requests))
    longest = max(len(request.blocks) for request in requests)
    rows: dict[str, dict[str, float]] = {}
    for at_once in args.at_once:
        num_blocks = max(trace.working_set // 10, (at_once + 1) * longest // 2 + 64)
        for size in args.sizes:
            num_slots = int(size * trace.working_set)
            for name in args.policies:
                for rate in args.rates:
                    about = Args(at_once, rate, name.endswith("sessions"))
                    for way in args.ways:
                        policy = keep_policy(name.partition(",")[0], num_slots, BLOCK)
                        pool = Pool(num_blocks, policy, way, args.mark)
                        row = Replay(pool, num_slots, policy, about).run(requests)
                        key = f"{at_once} at once, tier {size}, {name}, rate {rate}, {way}"
                        rows[key] = row
                        print(key, json.dumps(row), flush=True)
    report.write(
        requests=len(requests),
        seed=args.seed,
        working_set=trace.working_set,
        mark=args.mark,
        rows=rows,
    )


if __name__ == "__main__":
    run_main(main)

"""Hits of a host tier under an agents' trace, by policy and size, without a model.

    python benchmarks/tier_policies.py [--requests 3000] [--seed 0]

Agents of a few kinds share their kind's system prompt. A session asks again and again, with its
whole conversation and a tool's result at the end, and pauses while the tool runs. Between them come
prompts that nobody repeats. The working set is the most blocks that open sessions have at once; the
device's pool holds a tenth of it. The pool, the tier and its policies are the engine's own; blocks
have one byte, and an infinite cache is an infinite tier. Writes
benchmarks/results/tier_policies.json.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from tandem.engine.cache.block_pool import BlockPool
from tandem.engine.tiers.host_storage import HostStorage
from tandem.engine.tiers.keep_policy import keep_policy
from tandem.engine.tiers.tier import Tier
from tandem.engine.tiers.tiers import Tiers

RESULTS = Path(__file__).parent / "results" / "tier_policies.json"
BLOCK = 16
KINDS, SYSTEM = 5, (60, 200)  # kinds of agents, and blocks of a system prompt
TURNS, GROWTH = (4, 20), (4, 40)  # of a session, and blocks that a turn adds
ONCE, ONCE_SHARE = (30, 200), 0.35  # blocks of a prompt that nobody repeats, and their share
OPEN = 40  # sessions at once
DEVICE = 0.1  # of the working set
SIZES = (0.25, 0.5, 1.0)  # of a tier, in working sets
POLICIES = {"lru": ("lru", False), "prefix": ("prefix", False), "value": ("value", False)}
POLICIES |= {"value, sessions kept": ("value", True)}


@dataclass(frozen=True)
class Request:
    hashes: list[bytes]
    in_session: bool


@dataclass(order=True)
class Session:
    at: float  # of its next request
    hashes: list[bytes] = field(compare=False)
    turns_left: int = field(compare=False)


class Trace:
    """Requests in their order; `working_set` is known when all were made."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self._systems = [self._fresh(SYSTEM) for _ in range(KINDS)]
        self.working_set = 0

    def requests(self, count: int) -> Iterator[Request]:
        sessions = [self._open(self._rng.random() * 60) for _ in range(OPEN)]
        heapq.heapify(sessions)
        for _ in range(count):
            if self._rng.random() < ONCE_SHARE:
                yield Request(self._fresh(ONCE), in_session=False)
                continue
            session = heapq.heappop(sessions)
            session.hashes += self._fresh(GROWTH)
            yield Request(list(session.hashes), in_session=True)
            self.working_set = max(
                self.working_set, len({h for each in (session, *sessions) for h in each.hashes})
            )
            session.turns_left -= 1
            session.at += self._rng.lognormvariate(2.0, 1.2)  # a tool: 7 s in the middle
            heapq.heappush(sessions, session if session.turns_left else self._open(session.at))

    def _open(self, at: float) -> Session:
        return Session(at, list(self._rng.choice(self._systems)), self._rng.randint(*TURNS))

    def _fresh(self, sizes: tuple[int, int]) -> list[bytes]:
        return [self._rng.randbytes(16) for _ in range(self._rng.randint(*sizes))]


class InCall:
    """Runs a job as it is submitted."""

    def submit(self, job: Callable[[], object]) -> None:
        job()

    def close(self, deadline_s: float) -> None:
        pass


def hits(requests: list[Request], num_blocks: int, num_slots: int, policy: str) -> float:
    """Returns the share of blocks that were not computed."""
    name, keeps_sessions = POLICIES[policy]
    pool = BlockPool(num_blocks)
    storage = HostStorage(num_slots=num_slots, block_bytes=1)
    tier = Tier(0, storage, keep_policy(name, num_slots, BLOCK))
    tiers = Tiers(pool, np.zeros((num_blocks, 1), np.uint8), [tier], lambda _: InCall())
    num_hits = num_asked = 0
    for number, request in enumerate(requests):
        hashes = request.hashes
        here = len(pool.match(hashes))
        depth = max(here, tiers.depth(hashes))
        found = pool.reserve(hashes[:here], len(hashes))
        assert found is not None
        table = found.block_table
        if depth > here:
            tiers.load(str(number), hashes, here, table[here:depth])
            tiers.take_ended()
        for i in range(here, len(hashes)):
            table[i] = pool.store(
                table[i],
                parent_id=table[i - 1] if i else None,
                parent_hash=hashes[i - 1] if i else b"",
                block_hash=hashes[i],
            )
        tiers.use(hashes, keep=keeps_sessions and request.in_session)
        pool.release(table)
        while tiers.has_news:
            tiers.turn()
            tiers.take_events()
        num_hits += depth
        num_asked += len(hashes)
    pool.check_integrity([])
    tiers.check_integrity()
    return num_hits / num_asked


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    trace = Trace(args.seed)
    requests = list(trace.requests(args.requests))
    num_blocks = max(int(DEVICE * trace.working_set), max(len(r.hashes) for r in requests) + 64)
    all_blocks = len({h for request in requests for h in request.hashes})
    infinite = hits(requests, num_blocks, all_blocks, "lru")
    results = {"requests": len(requests), "seed": args.seed, "working_set": trace.working_set}
    results |= {"device": num_blocks, "blocks": all_blocks, "infinite": infinite}
    print(json.dumps(results))
    rows = {}
    for policy in POLICIES:
        rows[policy] = {
            str(size): hits(requests, num_blocks, int(size * trace.working_set), policy)
            for size in SIZES
        }
        print(policy, {size: f"{share / infinite:.3f}" for size, share in rows[policy].items()})
    args.output.write_text(json.dumps(results | {"hits": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Agents that play a trace on an engine with a host tier, by the policy of the tier.

    python -m benchmarks.tiers.agents [--requests 400] [--seed 0] [--family llama] [--only NAME ...]

The trace is that of benchmarks/tiers/policies.py, with tokens: the engine computes, writes, loads
and evicts as it does for clients. Its model is a tiny random one, because the trace has millions of
tokens. So it loads whatever a tier has, and only hits count: for this model it is faster to compute
a short prefix. Requests come one after another, each answered with one token; pins live in the
trace's time. The tier has the working set's size, the pool a tenth of it.

LMCache's default policy is played in the same tier: only whole chunks of 256 tokens are taken and
come back, and the least recently used goes first. All engines must make the same tokens. Writes
benchmarks/results/tier_agents.json.

A family with sliding windows, such as gemma3, is compared with what the trace repeats: no pool of a
window is infinite.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from benchmarks.shared.engines import make_engine, sequence
from benchmarks.shared.random_models import make_tiny_model
from benchmarks.simulator.agents_trace import BLOCK, Request, Trace
from benchmarks.tiers.policies import CHUNK, DEVICE, PIN_S, POLICIES, Policy
from tandem.common.perf_model.soonest import TierReach
from tandem.common.retention import PRIORITY_DEFAULT, PRIORITY_MAX, Retention
from tandem.engine.cache.layout.kv_groups import model_layout
from tandem.engine.tiers.slots.keep_policy import LeastRecentlyUsed
from tandem.models.folder import ModelFolder
from tandem_bench.framework import RESULTS, Report, options, run_main

LMCACHE = "LMCache"
INFINITE = "infinite"
VOCAB = 128  # tokens of the prompts


class WholeChunks(LeastRecentlyUsed):
    """Takes the blocks of whole chunks, which are told before the engine computes them."""

    def __init__(self) -> None:
        self.known: set[bytes] = set()

    def takes(self, block_hash: bytes) -> bool:
        return block_hash in self.known


def in_chunks(found: list[TierReach]) -> list[TierReach]:
    """Returns what tiers have in whole chunks."""
    return [TierReach(each.num_blocks // CHUNK * CHUNK, each.block_s) for each in found]


@dataclass
class Played:
    cached: int = 0
    prompt: int = 0
    seconds: float = 0.0

    @property
    def hits(self) -> float:
        return self.cached / self.prompt


class Player:
    """Plays requests on one engine with an empty pool and an empty tier."""

    def __init__(self, folder: ModelFolder, num_blocks: int, num_slots: int, name: str) -> None:
        self._policy = POLICIES.get(name, Policy("lru"))
        layout = model_layout(folder.config, block_size=BLOCK, dtype="float32")
        self.engine = engine = make_engine(
            folder,
            dtype="float32",
            num_blocks=num_blocks,
            max_tokens_per_step=2048,
            kv_tier_policy=self._policy.name,
            kv_host_bytes=num_slots * layout.block_bytes,
        )
        # Nothing is known of how long it computes, so it loads.
        loads: Any = engine._scheduler.loads
        loads._step_time = SimpleNamespace(prefill_rate=None)
        self._now = 0.0
        engine.kept.clock = lambda: self._now
        self._chunks = WholeChunks() if name == LMCACHE else None
        if self._chunks is not None:
            (tier,) = engine._tiers.tiers
            tier.policy = tier.pool.policy = self._chunks
            reach = engine._tiers.reach
            engine._tiers.reach = lambda *about: in_chunks(reach(*about))  # type: ignore[method-assign]
        self.played = Played()
        self.tokens: list[int] = []

    def play(self, number: int, request: Request) -> None:
        """Answers a request, lets the tier write what it wants to, and pins what waits."""
        engine, self._now = self.engine, request.at
        prompt = [byte % VOCAB for block in request.blocks for byte in block]
        returns = self._policy.knows_sessions and request.in_session
        priority = PRIORITY_MAX if returns else PRIORITY_DEFAULT
        retention = Retention(returns=returns, priority=priority)
        spec = sequence(str(number), prompt, 1, retention=retention)
        start = time.perf_counter()
        engine.add(spec)
        hashes = engine._sequences.find(str(number)).block_hashes
        if self._chunks is not None:
            self._chunks.known.update(hashes[: len(hashes) // CHUNK * CHUNK])
        self._settle()
        self.played.seconds += time.perf_counter() - start
        self.played.prompt += len(prompt)
        if self._policy.pins and request.calls_tool:
            engine.kept.keep(b"", Retention(pin_s=PIN_S), hashes)

    def _settle(self) -> None:
        while self.engine.has_work() or self.engine.awaits_threads():
            if not self.engine.has_work():
                time.sleep(1e-4)
                continue
            for new in self.engine.step().new_tokens:
                self.tokens += new.token_ids
                self.played.cached += new.num_cached_tokens


def play(player: Player, requests: Sequence[Request]) -> Played:
    try:
        for number, request in enumerate(requests):
            player.play(number, request)
        player.engine.check_integrity()
        return player.played
    finally:
        player.engine.close()


def repeated(requests: Sequence[Request]) -> float:
    """Returns the share of blocks that an infinite cache would have."""
    seen: set[bytes] = set()
    num_hits = num_asked = 0
    for request in requests:
        new = (i for i, block in enumerate(request.blocks) if block not in seen)
        num_hits += min(next(new, len(request.blocks)), len(request.blocks) - 1)
        num_asked += len(request.blocks)
        seen.update(request.blocks)
    return num_hits / num_asked


@options
class Options:
    requests: int = 400
    seed: int = 0
    family: Literal["llama", "gemma3"] = "llama"
    only: tuple[str, ...] = (INFINITE, *POLICIES, LMCACHE)
    output: Path = RESULTS / "tier_agents.json"


def main(args: Options = Options()) -> None:
    report = Report(args.output)
    trace = Trace(args.seed)
    requests = list(trace.requests(args.requests))
    longest = max(len(r.blocks) for r in requests)
    num_blocks = max(int(DEVICE * trace.working_set), longest + 64)
    all_blocks = len({b for request in requests for b in request.blocks})
    results = {"requests": len(requests), "seed": args.seed, "working_set": trace.working_set}
    results |= {"device": num_blocks, "blocks": all_blocks, "family": args.family}
    results |= {"repeated": repeated(requests)}
    print(json.dumps(results))
    rows: dict[str, dict[str, float]] = {}
    expected: list[int] = []
    with tempfile.TemporaryDirectory() as path:
        limit = (longest + 1) * BLOCK
        folder = make_tiny_model(Path(path), args.family, context_max=limit)
        for name in args.only:
            slots = all_blocks if name == INFINITE else trace.working_set
            player = Player(folder, num_blocks, slots, name)
            played = play(player, requests)
            expected = expected or player.tokens
            assert player.tokens == expected, f"{name} made other tokens"
            rows[name] = {"hits": played.hits, "seconds": played.seconds}
            infinite = rows[INFINITE]["hits"] if INFINITE in rows else results["repeated"]
            share = played.hits / infinite
            print(f"{name}: {played.hits:.3f}, {share:.3f} of infinite, {played.seconds:.1f} s")
    report.write(**results, rows=rows)


if __name__ == "__main__":
    run_main(main)

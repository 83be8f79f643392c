"""Chats whose KV does not fit the pool, with and without a tier below it.

    python benchmarks/tiers.py [--chats 8] [--turns 4] [--tokens 400] [--rounds 2] [--threads 1]

Users take turns with one engine; each comes back when all others have asked, with a prompt that
goes on from its last answer. The working set at the end is 1.3 times the pool. Engines without a
tier, with one on disk, with one in host memory, and with a pool for everything (an infinite cache)
take turns. Figures are of each chat's second turn and later: TTFT, the share of prompt tokens that
were cached, and the time of the tier in the engine's thread for each step.

Then the same without reuse: prompts that nobody repeats. Last, one prompt of 6,000 tokens that has
left the pool: loaded from host memory, beside computed. Tokens of all engines are compared. Writes
benchmarks/results/tiers.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.peers.machine import conditions
from tandem.config.engine import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.types import Mode, SamplingParams, SequenceSpec
from tandem.models.source import resolve

RESULTS = Path(__file__).parent / "results" / "tiers.json"
BLOCK = 16
WORKING_SET = 1.3  # times the pool
TIER_BYTES = 4 << 30
ANSWER = 16  # tokens
SAYS = 32  # tokens of a user's next turn
READS_S = 0.3  # between an answer and the next request
LONG = 6_000  # tokens
KINDS = ("none", "disk", "host", "infinite")


@dataclass
class Measured:
    """Requests of one engine."""

    ttft_ms: list[float] = field(default_factory=list)
    num_cached: int = 0
    num_prompt: int = 0
    tier_ms: list[float] = field(default_factory=list)  # in the engine's thread, of each step
    tokens: list[list[int]] = field(default_factory=list)
    num_dropped: int = 0

    def row(self) -> dict[str, Any]:
        """Returns the figures that stand in the table."""
        deciles = statistics.quantiles(self.ttft_ms, n=10)
        row = {
            "ttft_p50_ms": statistics.median(self.ttft_ms),
            "ttft_p90_ms": deciles[8],
            "cached": self.num_cached / self.num_prompt,
            "requests": len(self.ttft_ms),
            "dropped": self.num_dropped,
        }
        if self.tier_ms:
            percentiles = statistics.quantiles(self.tier_ms, n=100)
            row |= {"tier_p50_ms": percentiles[49], "tier_p99_ms": percentiles[98]}
        return row


class Client:
    """Asks one engine, one request at a time."""

    def __init__(self, engine: Engine, measured: Measured) -> None:
        self._engine = engine
        self.measured = measured
        self._num_asked = 0
        turn = engine._tiers.turn

        def timed() -> None:
            start = time.perf_counter()
            turn()
            measured.tier_ms.append(1e3 * (time.perf_counter() - start))

        if engine._tiers.tiers:
            engine._tiers.turn = timed  # type: ignore[method-assign]

    def ask(self, prompt: list[int], *, counts: bool = True) -> list[int]:
        """Returns the answer's tokens; the engine works on while its user reads them."""
        self._num_asked += 1
        sampling, name = SamplingParams(), str(self._num_asked)
        spec = SequenceSpec(name, list(prompt), len(prompt), Mode.LOCAL, sampling, ANSWER)
        start, first, answer, cached = time.perf_counter(), 0.0, list[int](), None
        self._engine.add(spec)
        while cached is None:
            for new in self._step():
                first = first or time.perf_counter()
                answer += new.token_ids
                if new.finish_reason:
                    cached = new.num_cached_tokens
        self.measured.tokens.append(answer)
        if counts:
            self.measured.ttft_ms.append(1e3 * (first - start))
            self.measured.num_cached += cached
            self.measured.num_prompt += len(prompt)
        until = time.perf_counter() + READS_S
        while time.perf_counter() < until:
            self._step()
        return answer

    def _step(self) -> list[Any]:
        if not self._engine.has_work():
            time.sleep(1e-4)
            return []
        return list(self._engine.step().new_tokens)


@contextmanager
def client_of(kind: str, num_blocks: int, threads: int, measured: Measured) -> Iterator[Client]:
    """An engine with an empty pool and an empty tier of this kind."""
    with tempfile.TemporaryDirectory() as folder:
        more: dict[str, Any] = {
            "disk": {"kv_disk_path": folder, "kv_disk_bytes": TIER_BYTES},
            "host": {"kv_host_bytes": TIER_BYTES},
        }.get(kind, {})
        config = EngineConfig(
            model="smollm2", device="cpu", num_blocks=num_blocks, num_threads=threads, **more
        )
        files = resolve(config.model)
        engine = Engine(config, ModelRunner(files, config), files.fingerprint)
        try:
            yield Client(engine, measured)
            measured.num_dropped += engine.load().blocks_dropped
        finally:
            engine.close()


def chat(client: Client, args: argparse.Namespace) -> None:
    """Many-turn chats, one turn of each after the other."""
    rng = Random(0)
    chats = [_random(rng, args.tokens) for _ in range(args.chats)]
    for turn in range(args.turns):
        for prompt in chats:
            prompt += client.ask(prompt, counts=turn > 0) + _random(rng, SAYS)


def ask_new(client: Client, args: argparse.Namespace) -> None:
    """Prompts that nobody repeats; the first ones only fill the pool."""
    rng = Random(1)
    for number in range(args.chats * args.turns):
        client.ask(_random(rng, args.tokens), counts=number >= args.chats)


def measure(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Returns a row for each work and kind of engine."""
    last = args.tokens + args.turns * (ANSWER + SAYS)
    needed = args.chats * (last // BLOCK + 1)
    rows = {}
    for work in (chat, ask_new):
        found = {kind: Measured() for kind in KINDS}
        for number in range(args.rounds):
            for kind in KINDS if number % 2 == 0 else reversed(KINDS):
                num_blocks = 2 * needed if kind == "infinite" else int(needed / WORKING_SET)
                with client_of(kind, num_blocks, args.threads, found[kind]) as client:
                    work(client, args)
        assert all(each.tokens == found["none"].tokens for each in found.values())
        for kind, measured in found.items():
            rows[f"{work.__name__} {kind}"] = measured.row()
            print(work.__name__, kind, json.dumps(rows[f"{work.__name__} {kind}"]), flush=True)
    return rows


def measure_long(args: argparse.Namespace) -> dict[str, Any]:
    """Asks a long prompt, then others until it has left the pool, then again."""
    rng, measured = Random(2), Measured()
    prompt, num_blocks = _random(rng, LONG), LONG // BLOCK + 20
    with client_of("host", num_blocks, args.threads, measured) as client:
        client.ask(prompt)
        for _ in range(args.long_rounds):
            client.ask(_random(rng, LONG), counts=False)
            client.ask(prompt)
    computed, *loaded = measured.ttft_ms
    assert measured.num_cached == (LONG - BLOCK) * args.long_rounds, measured.num_cached
    row = {"computed_ms": computed, "loaded_ms": statistics.median(loaded)}
    print("6,000 tokens", json.dumps(row))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=400, help="of a chat's first prompt")
    parser.add_argument("--rounds", type=int, default=2, help="of all engines")
    parser.add_argument("--long-rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    before = conditions()
    results = {"before": before, "long": measure_long(args), "rows": measure(args)}
    results |= {"after": conditions(), "arguments": {k: str(v) for k, v in vars(args).items()}}
    args.output.write_text(json.dumps(results, indent=1) + "\n")


def _random(rng: Random, num_tokens: int) -> list[int]:
    return [rng.randrange(100, 40_000) for _ in range(num_tokens)]


if __name__ == "__main__":
    main()

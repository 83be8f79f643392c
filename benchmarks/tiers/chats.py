"""Chats whose KV does not fit the pool, with and without a tier below it.

    python -m benchmarks.tiers.chats [--only rows long between] [--rounds 2] [--threads 1]

Users take turns with one engine; each comes back when all others have asked, with a prompt that
goes on from its last answer. The working set at the end is 1.3 times the pool. Engines without a
tier, with one on disk, with one in host memory, with a pool for everything (an infinite cache), and
with a cache that is emptied before each request take turns. Figures are of each chat's second turn
and later: TTFT, the share of prompt tokens that were cached, and the time of the tier in the
engine's thread for each step (step_time.py).

Then prompts that nobody repeats, and documents with several questions each, of which the pool holds
two and none comes back: a tier only costs there. One prompt of 6,000 tokens that has left
the pool: loaded from host memory, beside computed, and beside a copy of the same bytes and a step.
Last, the time between tokens of two streams, while prompts of 512 tokens come every few steps: from
a tier, or from a pool that holds all. Tokens of all engines are compared. Writes
each part's figures to benchmarks/results/tiers.json.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np

from benchmarks.shared.engines import make_engine, sequence
from benchmarks.shared.requests import random_prompt
from benchmarks.tiers.step_time import TierTime, percentiles
from tandem.common.retention import Retention
from tandem.engine.engine import Engine
from tandem_bench.framework import RESULTS, conditions, options, read, run_main, write

BLOCK = 16
WORKING_SET = 1.3  # times the pool
TIER_BYTES = 4 << 30
ANSWER = 16  # tokens
SAYS = 32  # tokens of a user's next turn
DOCUMENT, QUESTIONS = 1_200, 4  # tokens of a document, and questions about it
READS_S = 0.3  # between an answer and the next request
LONG = 6_000  # tokens
STREAM = 400  # tokens of a stream's answer
EVERY = 8  # tokens of a stream, a prompt comes
OTHERS, OTHER = 6, 512  # such prompts, and their tokens that come again
QUESTION = 8  # new tokens at the end of each
KINDS = ("none", "disk", "host", "infinite")
NO_CACHE = "no cache"
BY_VALUE = ("disk, value", "host, value")
ROWS = (*KINDS, *BY_VALUE, NO_CACHE)


@dataclass
class Measured:
    """Requests of one engine."""

    ttft_ms: list[float] = field(default_factory=list)
    num_cached: int = 0
    num_prompt: int = 0
    # Time of the engine's thread that went to the tiers, each step: of the CPU, and of the wall.
    tier_cpu_ms: list[float] = field(default_factory=list)
    tier_wall_ms: list[float] = field(default_factory=list)
    between_ms: list[float] = field(default_factory=list)  # two tokens of a stream
    num_loaded: int = 0  # blocks
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
        return row | self.tier_row()

    def tier_row(self) -> dict[str, float]:
        """Returns the tiers' time in a step; nothing without a tier."""
        return percentiles(self.tier_cpu_ms, self.tier_wall_ms) if self.tier_cpu_ms else {}


class Client:
    """Asks one engine, one request at a time."""

    def __init__(self, engine: Engine, measured: Measured, *, forgets: bool) -> None:
        """The pool is emptied before each request if it `forgets`."""
        self._engine = engine
        self._forgets = forgets
        self.block_bytes = engine.layout.block_bytes
        self.measured = measured
        self._num_asked = 0
        self._tier_time = TierTime(engine) if engine._tiers.tiers else None

    def ask(self, prompt: list[int], *, counts: bool = True, returns: bool = False) -> list[int]:
        """Returns the answer's tokens; the engine works on while its user reads them. It is told if
        the prompt `returns`."""
        self._num_asked += 1
        if self._forgets:
            self._engine.reset_prefix_cache()
        start, first, answer, cached = time.perf_counter(), 0.0, list[int](), None
        self._add(str(self._num_asked), prompt, ANSWER, returns=returns)
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

    def stream(self, prompts: list[list[int]], others: Iterator[list[int]]) -> None:
        """Answers `prompts` at once, and one of `others` with every few tokens of theirs."""
        for number, prompt in enumerate(prompts):
            self._add(f"s{number}", prompt, STREAM)
        told: dict[str, list[int]] = {f"s{number}": [] for number in range(len(prompts))}
        last, num_tokens = 0.0, 0
        while any(len(tokens) < STREAM for tokens in told.values()):
            for new in self._step():
                if new.sequence_id in told:
                    told[new.sequence_id] += new.token_ids
                if new.sequence_id == "s0":
                    now, num_tokens = time.perf_counter(), num_tokens + 1
                    if last:
                        self.measured.between_ms.append(1e3 * (now - last))
                    last = now
                    if num_tokens % EVERY == 0:
                        question = random_prompt(Random(num_tokens), QUESTION)
                        self._add(f"o{num_tokens}", next(others) + question, 1, returns=True)
        self.measured.tokens += told.values()
        self.measured.num_loaded += sum(t.blocks_loaded for t in self._engine.stats().tiers)

    def _add(self, name: str, prompt: list[int], max_tokens: int, *, returns: bool = False) -> None:
        spec = sequence(name, prompt, max_tokens, retention=Retention(returns=returns))
        self._engine.add(spec)

    def _step(self) -> list[Any]:
        if not self._engine.has_work():
            if self._tier_time is not None:
                self._tier_time.forget()
            time.sleep(1e-4)
            return []
        new_tokens = list(self._engine.step().new_tokens)
        if self._tier_time is not None:
            self._tier_time.end_step()
        return new_tokens

    def end(self) -> None:
        """Adds what was measured by the engine itself."""
        self.measured.num_dropped += self._engine.stats().blocks_dropped
        if self._tier_time is not None:
            cpu_ms, wall_ms = self._tier_time.take()
            self.measured.tier_cpu_ms += cpu_ms
            self.measured.tier_wall_ms += wall_ms


@contextmanager
def client_of(
    kind: str, num_blocks: int, threads: int, measured: Measured, block_size: int = BLOCK
) -> Iterator[Client]:
    """An engine with an empty pool and an empty tier of this kind."""
    with tempfile.TemporaryDirectory() as folder:
        more: dict[str, Any] = {
            "disk": {"kv_disk_path": folder, "kv_disk_bytes": TIER_BYTES},
            "host": {"kv_host_bytes": TIER_BYTES},
        }.get(kind.removesuffix(", value"), {})
        more["kv_tier_policy"] = "value" if kind in BY_VALUE else "lru"
        engine = make_engine(
            block_size=block_size, num_blocks=num_blocks, num_threads=threads, **more
        )
        try:
            client = Client(engine, measured, forgets=kind == NO_CACHE)
            yield client
            client.end()
        finally:
            engine.close()


def chat(client: Client, args: Options) -> None:
    """Many-turn chats, one turn of each after the other. The engine knows which turns go on from an
    answer, as a router tells it of a chat; it knows of no sessions."""
    rng = Random(0)
    chats = [random_prompt(rng, args.tokens) for _ in range(args.chats)]
    for turn in range(args.turns):
        for prompt in chats:
            prompt += client.ask(prompt, counts=turn > 0, returns=turn > 0)
            prompt += random_prompt(rng, SAYS)


def ask_new(client: Client, args: Options) -> None:
    """Prompts that nobody repeats; the first ones only fill the pool."""
    rng = Random(1)
    for number in range(args.chats * args.turns):
        client.ask(random_prompt(rng, args.tokens), counts=number >= args.chats)


def ask_documents(client: Client, args: Options) -> None:
    """Long documents, each with several questions in a row, and none comes back after that."""
    rng = Random(4)
    for number in range(args.chats):
        document = random_prompt(rng, DOCUMENT)
        for _ in range(QUESTIONS):
            client.ask(document + random_prompt(rng, SAYS), counts=number > 0)


WORKS = {"chat": chat, "new": ask_new, "documents": ask_documents}


def measure(args: Options) -> dict[str, dict[str, Any]]:
    """Returns a row for each work and kind of engine."""
    last = args.tokens + args.turns * (ANSWER + SAYS)
    size = args.block_size
    needed = args.chats * (last // size + 1)
    rows = {}
    for work in (WORKS[name] for name in args.works):
        found = {kind: Measured() for kind in args.kinds}
        for number in range(args.rounds):
            for kind in found if number % 2 == 0 else reversed(found):
                num_blocks = 2 * needed if kind == "infinite" else int(needed / WORKING_SET)
                with client_of(kind, num_blocks, args.threads, found[kind], size) as client:
                    work(client, args)
        first, *others = found.values()
        assert all(each.tokens == first.tokens for each in others)
        for kind, measured in found.items():
            rows[f"{work.__name__} {kind}"] = measured.row()
            print(work.__name__, kind, json.dumps(rows[f"{work.__name__} {kind}"]), flush=True)
    return rows


def measure_long(args: Options) -> dict[str, Any]:
    """Asks a long prompt, then others until it has left the pool, then again."""
    rng, measured = Random(2), Measured()
    size = args.block_size
    prompt, num_blocks = random_prompt(rng, LONG), LONG // size + 20
    with client_of("host", num_blocks, args.threads, measured, size) as client:
        client.ask(prompt)
        for _ in range(args.long_rounds):
            client.ask(random_prompt(rng, LONG), counts=False)
            client.ask(prompt)
        computed, *loaded = measured.ttft_ms
        for _ in range(args.long_rounds):
            client.ask(prompt)
        again = measured.ttft_ms[1 + args.long_rounds :]
        block_bytes = client.block_bytes
    assert measured.num_cached == (LONG - size) * 2 * args.long_rounds, measured.num_cached
    row = {"computed_ms": computed, "loaded_ms": statistics.median(loaded)}
    row["copy_ms"] = copy_ms((LONG - size) // size * block_bytes)
    row["step_ms"] = statistics.median(again)
    print("6,000 tokens", json.dumps(row))
    return row


def measure_between(args: Options) -> dict[str, dict[str, float]]:
    """Two streams, and between their tokens prompts that come from a tier or are in the pool."""
    size = args.block_size
    found = {kind: Measured() for kind in args.kinds if kind not in ("none", NO_CACHE)}
    for number in range(args.between_rounds):
        for kind in found if number % 2 == 0 else reversed(found):
            rng = Random(3)
            chats = [random_prompt(rng, OTHER) for _ in range(OTHERS)]
            streams = [random_prompt(rng, 64) for _ in range(2)]
            needed = 2 * ((64 + STREAM) // size + 1) + 2 * (OTHER // size + 1)
            num_blocks = needed + (OTHERS * OTHER if kind == "infinite" else OTHER) // size
            with client_of(kind, num_blocks, args.threads, found[kind], size) as client:
                for prompt in chats:
                    client.ask(prompt, returns=True)
                client.stream(streams, cycle(chats))
    first, *others = found.values()
    assert all(each.tokens == first.tokens for each in others)
    rows = {}
    for kind, measured in found.items():
        cuts = statistics.quantiles(measured.between_ms, n=100)
        row = {"p50_ms": cuts[49], "p99_ms": cuts[98]}
        row |= {"tokens": len(measured.between_ms), "loaded": measured.num_loaded}
        rows[kind] = row | measured.tier_row()
        print("between tokens", kind, json.dumps(rows[kind]), flush=True)
    return rows


def copy_ms(num_bytes: int) -> float:
    """Returns how long the system copies so many bytes, into and out of memory that is in use."""
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    best = []
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(target, source)
        best.append(1e3 * (time.perf_counter() - start))
    return statistics.median(best)


PARTS = {"long": measure_long, "rows": measure, "between": measure_between}


@options
class Options:
    chats: int = 8
    turns: int = 4
    """Turns of a chat."""
    tokens: int = 400
    """Tokens of a chat's first prompt."""
    rounds: int = 2
    """Rounds of all engines."""
    long_rounds: int = 3
    between_rounds: int = 3
    only: tuple[Literal["long", "rows", "between"], ...] = ()
    """Parts to measure. Default: all."""
    works: tuple[Literal["chat", "new", "documents"], ...] = tuple(WORKS)
    """Work of the rows."""
    kinds: tuple[Literal[ROWS], ...] = ROWS
    """Kinds of tiers."""
    threads: int = 1
    block_size: int = BLOCK
    output: Path = RESULTS / "tiers.json"


def main(options: Options = Options()) -> None:
    results = read(options.output)
    for name in options.only or PARTS:
        before = conditions()
        found = PARTS[name](options)
        results[name] = {"before": before, "found": found, "after": conditions()}
        results[name]["arguments"] = options
    write(options.output, results)


if __name__ == "__main__":
    run_main(main)

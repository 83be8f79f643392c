"""TTFT of prompts that a throttled tier or peer has, beside loading all and computing all of them.

    python -m benchmarks.tiers.prices [--tiers host disk store peer peer-host peer-disk decode]

An engine with SmolLM2 and one tier, whose reads are slowed down to a bandwidth (MB/s). A prompt is
written to the tier, leaves the pool, and is asked again: once as the engine chooses, once with all
of its blocks loaded, and once computed, by turns. The store is moto's server. For `peer` another
worker has the prompt, and its blocks are pulled over a link of that bandwidth (peer_prices.py). For
`peer-host` and `peer-disk` another worker has the prompt in a tier of that bandwidth, and loads it
before it is pulled over a fast link. For `decode` a decode worker has the prompt in its tier, a
prefill worker has it in its pool, and the bandwidths of tier and link differ: once as the decode
worker chooses, once without the prefill worker, and once without the tier. What counts there is the
time to the second token.

The engine should choose what is soonest: its TTFT over the better one of the two others is at most
1.05 on average, and in each cell at most 1.10 or 10 ms longer. Tokens of all are compared. Writes
benchmarks/results/tier_prices.json, in which it replaces the tiers that it measured.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any, Literal, Protocol
from unittest.mock import patch

from benchmarks.shared.engines import make_engine, sequence
from benchmarks.shared.requests import random_prompt
from benchmarks.tiers.object_store import KEYS, ObjectStore
from benchmarks.tiers.peer_prices import (
    DecodeBench,
    PeerBench,
    PeerDiskBench,
    PeerHostBench,
    peer_bench,
)
from tandem.common.perf_model.soonest import LoadChoice, Prompt, TierReach
from tandem.engine.engine import Engine
from tandem.engine.tiers.storage import Bytes
from tandem_bench.framework import RESULTS, conditions, options, read, run_main, write

CHOOSE = "tandem.engine.scheduler.loads.choose_soonest"
TIER_BYTES = 1 << 30
BLOCK = 16
KINDS = ("host", "disk", "store", "peer", "peer-host", "peer-disk", "decode")
PEERS = {"peer": PeerBench, "peer-host": PeerHostBench, "peer-disk": PeerDiskBench}
BOTH_MB_PER_S = ((30.0, 200.0), (200.0, 30.0), (30.0, 30.0))  # of a decode worker's tier and link


class Bench(Protocol):
    """A prompt is asked of it in each of the ways; the first one is the choice."""

    @property
    def ways(self) -> Sequence[str]: ...

    def throttle(self, bytes_per_s: float) -> None:
        """Lets blocks come at this rate from now on."""

    def prepare(self, prompt: list[int]) -> None:
        """Has the prompt computed where the blocks come from."""

    def ask(self, prompt: list[int], way: str) -> tuple[float, int]:
        """Returns the milliseconds to the first token, and the token."""


class TierBench:
    """An engine with one tier, and the prompts that it was asked."""

    ways = ("soonest", "load", "compute")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._storage: Any = engine._tiers.tiers[0].storage
        self._is_store = self._storage.name == "store"
        self._read = self._storage._get if self._is_store else self._storage.read
        self._num_asked = 0

    def throttle(self, bytes_per_s: float) -> None:
        """Lets reads take as long as their bytes do at this rate, one after the other."""
        if self._is_store:
            self._storage._get = one_by_one(self._read, bytes_per_s)
            return

        def read(slot: int, block_hash: bytes, target: Bytes) -> None:
            until = time.perf_counter() + target.nbytes / bytes_per_s
            self._read(slot, block_hash, target)
            time.sleep(max(0.0, until - time.perf_counter()))

        self._storage.read = read

    def prepare(self, prompt: list[int]) -> None:
        self.ask(prompt, "compute")

    def ask(self, prompt: list[int], way: str) -> tuple[float, int]:
        """Returns the milliseconds to the first token, and the token."""
        self._engine._kv.drop_cached()
        with _forced(self._engine, way):
            start = time.perf_counter()
            self._num_asked += 1
            self._engine.add(sequence(str(self._num_asked), prompt, 1))
            told: list[int] = []
            while not told:
                told = self._step()
            ttft_ms = 1e3 * (time.perf_counter() - start)
        while self._engine.has_work() or self._engine.awaits_threads():
            self._step()
        return ttft_ms, told[0]

    def _step(self) -> list[int]:
        if not self._engine.has_work():
            time.sleep(1e-4)
            return []
        return [token for new in self._engine.step().new_tokens for token in new.token_ids]


def one_by_one(get: Callable[[bytes], bytes], bytes_per_s: float) -> Callable[[bytes], bytes]:
    """Returns a call for several threads, whose answers share a link of this rate."""
    lock, free_at = threading.Lock(), 0.0

    def slow_get(block_hash: bytes) -> bytes:
        nonlocal free_at
        began = time.perf_counter()
        data = get(block_hash)
        with lock:
            free_at = until = max(free_at, began) + len(data) / bytes_per_s
        time.sleep(max(0.0, until - time.perf_counter()))
        return data

    return slow_get


@contextmanager
def _forced(engine: Engine, way: str) -> Iterator[None]:
    if way == "soonest":
        yield
    elif way == "compute":
        with patch.object(engine._tiers, "reach", lambda *_: []):
            yield
    else:
        with patch(CHOOSE, _load_all):
            yield


def _load_all(prompt: Prompt, tiers: Sequence[TierReach], **_: Any) -> LoadChoice:
    end = max(tier.num_blocks for tier in tiers)
    return LoadChoice(prompt.num_held, end, False, 0.0, 0.0, 0.0)


def measure(kind: str, args: Options) -> list[dict[str, Any]]:
    """Returns a row for each bandwidth and length."""
    if kind == "decode":
        return measure_decode(args)
    num_blocks = max(args.lengths) // BLOCK + 8
    peers = PEERS.get(kind)
    make = peer_bench(num_blocks, args.threads, peers) if peers else tier_bench(kind, args)
    rows = []
    with make as bench:
        for bandwidth in args.bandwidths:
            bench.throttle(bandwidth * 1e6)
            for length in args.lengths:
                about = {"tier": kind, "mb_per_s": bandwidth, "tokens": length}
                rows.append(measure_cell(bench, about, args.rounds))
    return rows


def measure_decode(args: Options) -> list[dict[str, Any]]:
    """Returns a row for each pair of bandwidths and length."""
    rows = []
    with peer_bench(max(args.lengths) // BLOCK + 8, args.threads, DecodeBench) as bench:
        for tier, link in BOTH_MB_PER_S:
            assert isinstance(bench, DecodeBench)
            bench.throttle_both(tier * 1e6, link * 1e6)
            for length in args.lengths:
                about = {"tier": "decode", "mb_per_s": tier, "link_mb_per_s": link}
                rows.append(measure_cell(bench, {**about, "tokens": length}, args.rounds))
    return rows


@contextmanager
def tier_bench(kind: str, args: Options) -> Iterator[TierBench]:
    """Runs an engine with one tier."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        more: dict[str, Any] = {}
        if kind == "host":
            more = {"kv_host_bytes": TIER_BYTES}
        elif kind == "disk":
            more = {"kv_disk_path": str(folder), "kv_disk_bytes": TIER_BYTES}
        else:
            os.environ |= KEYS
            more = stack.enter_context(ObjectStore()).settings
        engine = make_engine(
            num_blocks=max(args.lengths) // BLOCK + 8,
            num_threads=args.threads,
            kv_tier_policy="lru",
            **more,
        )
        stack.callback(engine.close)
        yield TierBench(engine)


def measure_cell(bench: Bench | PeerBench, about: dict[str, Any], rounds: int) -> dict[str, Any]:
    length, ways = about["tokens"], bench.ways
    prompt = random_prompt(Random(length), length)
    bench.prepare(prompt)
    for way in (ways[2], "load", "load", "load"):  # the rates of this cell are known then
        bench.ask(prompt, way)
    found: dict[str, list[float]] = {way: [] for way in ways}
    tokens = set()
    for number in range(rounds):
        for way in ways if number % 2 == 0 else reversed(ways):
            ttft_ms, token = bench.ask(prompt, way)
            found[way].append(ttft_ms)
            tokens.add(token)
    assert len(tokens) == 1, tokens
    row = about | {f"{way}_ms": statistics.median(values) for way, values in found.items()}
    best_ms = min(row[f"{way}_ms"] for way in ways[1:])
    row["ratio"] = row["soonest_ms"] / best_ms
    row["is_within"] = row["ratio"] <= 1.10 or row["soonest_ms"] <= best_ms + 10
    print(json.dumps(row), flush=True)
    return row


@options
class Options:
    tiers: tuple[Literal[KINDS], ...] = KINDS
    bandwidths: tuple[float, ...] = (10.0, 30.0, 200.0)
    """Bandwidths of a tier or link, in MB/s."""
    lengths: tuple[int, ...] = (256, 512, 1024)
    """Tokens of a prompt."""
    rounds: int = 5
    threads: int = 1
    output: Path = RESULTS / "tier_prices.json"


def main(options: Options = Options()) -> None:
    found = read(options.output).get("tiers", {})
    for kind in options.tiers:
        before = conditions()
        rows = measure(kind, options)
        found[kind] = {
            "before": before,
            "after": conditions(),
            "arguments": options,
            "rows": rows,
        }
        rows = [row for name in found if name != "decode" for row in found[name]["rows"]]
        rows = rows or found["decode"]["rows"]
        mean_ratio = statistics.mean(row["ratio"] for row in rows)
        within = f"{sum(row['is_within'] for row in rows)} of {len(rows)} cells"
        write(options.output, {"mean_ratio": mean_ratio, "within": within, "tiers": found})
        print(mean_ratio, within)


if __name__ == "__main__":
    run_main(main)

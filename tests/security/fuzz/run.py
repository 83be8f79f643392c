"""Fuzzes a running router and worker, the parsers of model files, and messages between processes.

python -m tests.security.fuzz.run --inputs 1000000 --seed 1 --state /tmp/fuzz.json

Parsers get their inputs in a child process; in parallel a router and a worker get theirs by
sockets. The state file has the progress of each target: after an interruption the same command
continues. At the end it prints the inputs, the failures and the growth of memory by target, and
exits with status 1 if an input failed or a process grew too much.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.security.fuzz.child import FAILURES_MAX, Outcome, ParserProcess
from tests.security.fuzz.file_targets import file_targets
from tests.security.fuzz.inputs import batch_of
from tests.security.fuzz.parser_targets import (
    Bodies,
    EngineMessages,
    GrpcMessages,
    ParserTarget,
    Records,
)
from tests.security.fuzz.served import Served, serving
from tests.security.fuzz.socket_targets import (
    HttpBodies,
    RawHttp,
    RedisRecords,
    RouterCalls,
    SocketTarget,
    WorkerCalls,
)

GROWTH_BYTES_MAX = 64 << 20  # limit for a process in one run, after its first batch
# The safetensors library keeps 1.3 KB for each file that it reads; a server reads few files, once.
KEPT_BYTES = {"safetensors": 1024, "gguf": 4096, "model-folder": 4096}  # bytes kept for one input
BATCH_MAX = 5000
# Shares of a million inputs: 700,000 for parsers, 200,000 for a router by HTTP and Redis, 100,000
# by gRPC. Most parsers take microseconds; a complete model takes milliseconds.
PARSERS = {
    "engine-messages": 200_000,
    "records": 120_000,
    "grpc-messages": 90_000,
    "bodies": 90_000,
    "gguf-layout": 100_000,
    "safetensors": 60_000,
    "gguf": 15_000,
    "model-folder": 25_000,
}
# Records come last, because a valid key among them closes the router to clients without a key.
SOCKETS: dict[str, tuple[int, Callable[[Served], SocketTarget]]] = {
    "http-bytes": (100_000, RawHttp),
    "http-bodies": (80_000, HttpBodies),
    "grpc-router": (60_000, RouterCalls),
    "grpc-worker": (40_000, WorkerCalls),
    "redis-records": (20_000, RedisRecords),
}
NAMES = (*PARSERS, *SOCKETS)


class Progress(msgspec.Struct):
    """The progress of one target. `start_bytes` is the memory of its process after the first batch
    of the last run."""

    num_inputs: int = 0
    num_batches: int = 0
    seconds: float = 0.0
    failures: list[str] = []
    start_bytes: int = 0
    end_bytes: int = 0

    @property
    def growth_bytes(self) -> int:
        return self.end_bytes - self.start_bytes


class Run:
    """The progress of all targets, saved after each batch."""

    def __init__(self, num_inputs: int, base_seed: int, state: Path | None) -> None:
        self._num_inputs = num_inputs
        self._seed = base_seed
        self._state = state
        self._lock = threading.Lock()  # two threads add progress
        self.is_stopping = False  # True: start no further batches
        kept = dict[str, Progress]
        saved = state.read_bytes() if state is not None and state.is_file() else b"{}"
        self.progress = msgspec.json.decode(saved, type=kept)

    def next_batch(self, name: str, part: int) -> tuple[int, int] | None:
        """Returns the seed and the size of the target's next batch; None if it has had its
        share."""
        progress = self.progress.setdefault(name, Progress())
        if self.is_stopping:
            return None
        left = -(-self._num_inputs * part // 1_000_000) - progress.num_inputs
        if left <= 0:
            return None
        return self._seed * 1_000_003 + progress.num_batches, min(left, BATCH_MAX)

    def add(self, name: str, size: int, outcome: Outcome, seconds: float, *, first: bool) -> None:
        """Records a completed batch."""
        with self._lock:
            progress = self.progress[name]
            progress.num_inputs += size
            progress.num_batches += 1
            progress.seconds += seconds
            progress.failures += outcome.failures
            progress.end_bytes = outcome.rss_bytes
            if first:
                progress.start_bytes = outcome.rss_bytes
            if self._state is not None:
                unfinished = self._state.with_suffix(".new")
                unfinished.write_bytes(msgspec.json.encode(self.progress))
                unfinished.replace(self._state)


def parser_targets(folder: Path) -> Mapping[str, ParserTarget]:
    """Creates the targets of the child process."""
    return {
        "engine-messages": EngineMessages(),
        "records": Records(),
        "grpc-messages": GrpcMessages(),
        "bodies": Bodies(),
        **file_targets(folder / "files"),
    }


def fuzz_parsers(run: Run, names: Sequence[str]) -> None:
    """Runs the share of inputs of each of these parsers."""
    child = ParserProcess(parser_targets)
    try:
        for name in names:
            first = True
            while batch := run.next_batch(name, PARSERS[name]):
                base_seed, size = batch
                started = time.monotonic()
                outcome = child.run(name, base_seed, size)
                run.add(name, size, outcome, time.monotonic() - started, first=first)
                first = False
    finally:
        child.close()


async def fuzz_sockets(run: Run, served: Served, names: Sequence[str]) -> None:
    """Runs the share of inputs of each of these targets."""
    for name in names:
        part, make = SOCKETS[name]
        target = make(served)
        first = True
        while batch := run.next_batch(name, part):
            base_seed, size = batch
            started = time.monotonic()
            failures = await _failures(target, batch_of(target.source, base_seed, size))
            try:
                await served.check()
            except Exception as error:
                failures.append(f"after the inputs of seed {base_seed}: {error!r}")
            outcome = Outcome(failures[:FAILURES_MAX], target.rss_bytes())
            run.add(name, size, outcome, time.monotonic() - started, first=first)
            first = False
        await target.close()


async def _failures(target: SocketTarget, inputs: Sequence[Any]) -> list[str]:
    """Runs the inputs against the target, several at once. Returns the failures."""
    failures: list[str] = []
    left = iter(inputs)

    async def client() -> None:
        for value in left:
            try:
                await target.check(value)
            except Exception as error:
                failures.append(f"{value!r:.400}: {error!r:.1000}")

    async with asyncio.TaskGroup() as clients:
        for _ in range(target.at_once):
            clients.create_task(client())
    return failures


def fuzz(
    names: Sequence[str], num_inputs: int, base_seed: int, state: Path | None
) -> dict[str, Progress]:
    """Runs until each target has had its share of the inputs. Returns the progress of each."""
    run = Run(num_inputs, base_seed, state)
    parsers = [name for name in PARSERS if name in names]
    sockets = [name for name in SOCKETS if name in names]
    errors: list[Exception] = []

    def of_parsers() -> None:
        try:
            fuzz_parsers(run, parsers)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=of_parsers)
    thread.start()
    try:
        if any(run.next_batch(name, SOCKETS[name][0]) for name in sockets):
            with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as served:
                asyncio.run(fuzz_sockets(run, served, sockets))
    except BaseException:
        run.is_stopping = True
        raise
    finally:
        thread.join()
    if errors:
        raise errors[0]
    return run.progress


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of all targets together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--state", type=Path, help="JSON file to go on from")
    parser.add_argument("--targets", default=",".join(NAMES))
    arguments = parser.parse_args()
    names = arguments.targets.split(",")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended; the same command goes on"))
    done = fuzz(names, arguments.inputs, arguments.seed, arguments.state)
    for name, progress in done.items():
        print(
            f"{name:16} {progress.num_inputs:8,} inputs in {progress.seconds:6.0f} s, "
            f"{len(progress.failures)} failures, memory {progress.growth_bytes / 1e6:+.1f} MB"
        )
        for failure in progress.failures:
            print(f"    {failure}")
    return 1 if any(is_bad(name, progress) for name, progress in done.items()) else 0


def is_bad(name: str, progress: Progress) -> bool:
    """Says whether an input failed or the process grew too much."""
    kept_bytes = KEPT_BYTES.get(name, 0) * progress.num_inputs
    return bool(progress.failures) or progress.growth_bytes > GROWTH_BYTES_MAX + kept_bytes


if __name__ == "__main__":
    sys.exit(main())

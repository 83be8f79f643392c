"""Fuzzes a running router and worker, the files of models, and what processes tell each other.

    python -m tests.security.fuzz.run --inputs 1000000 --seed 1 --state /tmp/fuzz.json

Targets take turns, a batch each, until each has its part of the inputs. The state says how far each
target is: the same command goes on from there after an end of any kind. At the end it prints the
inputs, the failures and the growth of memory by target, and exits with status 1 if an input failed
or a process grew too much.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
from hypothesis import HealthCheck, Phase, given, seed, settings

from tandem.cluster.launch.embedded_redis import EmbeddedRedis
from tests.harness.cluster import LocalCluster
from tests.harness.router_process import RouterProcess, started_router
from tests.security.fuzz.file_targets import file_targets
from tests.security.fuzz.inputs import Target
from tests.security.fuzz.router_targets import HttpBodies, RawHttp, RedisRecords, RouterCalls
from tests.security.fuzz.worker_targets import EngineMessages, WorkerCalls

GROWTH_BYTES_MAX = 64 << 20  # of a process in one run
BATCH = 2000
# Parts of all inputs, as fast as each target is: a model's files take 20 ms.
PARTS = {
    "engine-messages": 0.30,
    "http-bytes": 0.15,
    "http-bodies": 0.15,
    "grpc-router": 0.15,
    "redis-records": 0.20,
    "grpc-worker": 0.04,
    "gguf": 0.005,
    "model-folder": 0.005,
}


class Progress(msgspec.Struct):
    """The progress of one target. `start_bytes` is the memory before its first input."""

    num_inputs: int = 0
    num_batches: int = 0
    seconds: float = 0.0
    failures: list[str] = []
    start_bytes: int = 0
    end_bytes: int = 0

    @property
    def growth_bytes(self) -> int:
        return self.end_bytes - self.start_bytes


def run_batch(target: Target, progress: Progress, base_seed: int, size: int) -> None:
    """Gives the target its next batch, which depends on the seed and its number only."""
    count = 0

    @seed(base_seed * 1_000_003 + progress.num_batches)
    @settings(
        max_examples=size,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(target.inputs)
    def check(value: object) -> None:
        nonlocal count
        count += 1
        target.check(value)

    started = time.monotonic()
    try:
        check()
    except Exception as error:  # hypothesis groups several
        notes = " ".join(getattr(error, "__notes__", []))
        progress.failures.append(f"batch {progress.num_batches}: {error!r:.1000} {notes:.1000}")
    progress.num_inputs += count
    progress.num_batches += 1
    progress.seconds += time.monotonic() - started
    progress.end_bytes = target.rss_bytes()


@contextmanager
def running_router(folder: Path) -> Iterator[RouterProcess]:
    """Runs the scripted worker of a router in a thread with an event loop of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    made = started_router(folder)
    router = asyncio.run_coroutine_threadsafe(made.__aenter__(), loop).result()
    try:
        yield router
    finally:
        over = made.__aexit__(None, None, None)
        asyncio.run_coroutine_threadsafe(over, loop).result()
        loop.call_soon_threadsafe(loop.stop)


@contextmanager
def running_targets(folder: Path, names: Sequence[str]) -> Iterator[list[Target]]:
    """Starts what the targets of these names need."""
    with ExitStack() as stack:
        found: list[Target] = []
        routed = {
            "http-bytes": RawHttp,
            "http-bodies": HttpBodies,
            "grpc-router": RouterCalls,
            "redis-records": RedisRecords,
        }
        if routed.keys() & set(names):
            router = stack.enter_context(running_router(folder))
            found += [make(router) for name, make in routed.items() if name in names]
        if "grpc-worker" in names:
            cluster = LocalCluster(stack.enter_context(EmbeddedRedis()), folder)
            stack.callback(cluster.close)
            cluster.start(prefill=0, decode=1)
            worker = WorkerCalls(cluster.workers["decode-0"])
            stack.callback(worker.check_integrity)
            found.append(worker)
        if "engine-messages" in names:
            found.append(EngineMessages())
        if {"gguf", "model-folder"} & set(names):
            found += [t for t in file_targets(folder / "files") if t.name in names]
        yield found


def fuzz(
    names: Sequence[str], num_inputs: int, base_seed: int, state: Path | None, batch: int
) -> dict[str, Progress]:
    """Runs until each target has its part of the inputs; returns how far each is."""
    kept = dict[str, Progress]
    done = msgspec.json.decode(state.read_bytes(), type=kept) if state and state.is_file() else {}
    with (
        tempfile.TemporaryDirectory() as folder,
        running_targets(Path(folder), names) as targets,
    ):
        for target in targets:  # memory is compared within one run of the processes
            progress = done.setdefault(target.name, Progress())
            progress.start_bytes = progress.end_bytes = target.rss_bytes()
        under_way = list(targets)
        while under_way:
            for target in list(under_way):
                progress = done[target.name]
                left = round(num_inputs * PARTS[target.name]) - progress.num_inputs
                if left <= 0:
                    under_way.remove(target)
                    continue
                size = min(left, max(20, round(batch * PARTS[target.name] / max(PARTS.values()))))
                run_batch(target, progress, base_seed, size)
                if state is not None:
                    state.write_bytes(msgspec.json.encode(done))
    return done


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of all targets together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--state", type=Path, help="JSON file to go on from")
    parser.add_argument("--batch", type=int, default=BATCH, help="inputs between two saves")
    parser.add_argument("--targets", default=",".join(PARTS))
    arguments = parser.parse_args()
    names = arguments.targets.split(",")
    done = fuzz(names, arguments.inputs, arguments.seed, arguments.state, arguments.batch)
    for name, progress in done.items():
        print(
            f"{name:16} {progress.num_inputs:8,} inputs in {progress.seconds:6.0f} s, "
            f"{len(progress.failures)} failures, memory {progress.growth_bytes / 1e6:+.1f} MB"
        )
        for failure in progress.failures:
            print(f"    {failure}")
    bad = [p for p in done.values() if p.failures or p.growth_bytes > GROWTH_BYTES_MAX]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs parsers in a child process, with batches of thousands of inputs.

By a counter in shared memory the parent detects an input that hangs or that ends the process. It
starts another child that continues after that input. An input whose parser uses too much memory
also counts as a failure.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.security.fuzz.inputs import batch_of

HANG_S = 20.0
GROWTH_OF_INPUT_BYTES_MAX = 256 << 20
FAILURES_MAX = 20  # limit for one batch; more of them would add nothing new
# the parent's threads may hold locks, so fork is unsafe
_spawn = multiprocessing.get_context("spawn")


class Outcome(NamedTuple):
    """The outcome of a batch. `rss_bytes` is the memory of the process at its end."""

    failures: list[str]
    rss_bytes: int


class _Batch(NamedTuple):
    name: str
    seed: int
    size: int
    first: int = 0  # index of the first input to run
    ended: str = ""  # what the previous input did to an earlier child


Targets = Callable[[Path], Mapping[str, Any]]


class ParserProcess:
    """A child process that runs inputs against the targets created by `make_targets(folder)`."""

    def __init__(self, make_targets: Targets, *, hang_s: float = HANG_S) -> None:
        self._make_targets = make_targets
        self._hang_s = hang_s
        self._folder = tempfile.TemporaryDirectory(dir=_memory_folder())
        # number of inputs started, including the current one
        self._num_given = _spawn.Value("Q", 0)
        self._start()

    def run(self, name: str, seed: int, size: int) -> Outcome:
        """Runs a batch of inputs against a target."""
        failures: list[str] = []
        batch = _Batch(name, seed, size)
        while True:
            self._num_given.value = 0
            self._pipe.send(batch)
            result = self._wait(failures)
            if isinstance(result, int):
                return Outcome(failures, result)
            # An end before the first input has another cause; it recurs if it matters.
            assert self._num_given.value, result
            batch = batch._replace(first=self._num_given.value, ended=result)
            self.close_process()
            self._start()

    def close(self) -> None:
        """Ends the child and removes its files."""
        self.close_process()
        self._folder.cleanup()

    def close_process(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _start(self) -> None:
        self._pipe, theirs = _spawn.Pipe()
        arguments = (self._make_targets, Path(self._folder.name), theirs, self._num_given)
        self._process = _spawn.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def _wait(self, failures: list[str]) -> int | str:
        """Waits for the end of the batch. Returns the memory of the child, or why the batch did not
        end."""
        seen = 0
        since = time.monotonic()
        while True:
            try:
                if self._pipe.poll(0.2):
                    result = self._pipe.recv()
                    if isinstance(result, int):
                        return result
                    failures.append(result)
            except (EOFError, ConnectionError):
                self._process.join()
                return f"the process ended with {self._process.exitcode}"
            if (num_given := self._num_given.value) != seen or not seen:
                seen = num_given
                since = time.monotonic()
            elif time.monotonic() - since > self._hang_s:
                return f"no end within {self._hang_s:g} s"


def _serve(make_targets: Targets, folder: Path, pipe: Connection, num_given: Any) -> None:
    targets = make_targets(folder)
    memory = _PeakMemory()
    while True:
        batch = _Batch(*pipe.recv())
        target = targets[batch.name]
        inputs = batch_of(target.source, batch.seed, batch.size)
        if batch.ended:
            pipe.send(f"{inputs[batch.first - 1]!r:.400}: {batch.ended}")
        num_failures = 0
        for number in range(batch.first, len(inputs)):
            num_given.value = number + 1
            if failure := _failure(target, inputs[number], memory):
                num_failures += 1
                if num_failures <= FAILURES_MAX:
                    pipe.send(f"{inputs[number]!r:.400}: {failure:.1000}")
        pipe.send(int(psutil.Process().memory_info().rss))


def _failure(target: Any, value: object, memory: _PeakMemory) -> str:
    try:
        target.check(value)
    except Exception as error:
        return repr(error)
    grown = memory.growth_bytes()
    return f"it took {grown >> 20} MiB" if grown > GROWTH_OF_INPUT_BYTES_MAX else ""


class _PeakMemory:
    """The peak memory of this process. `resource` would include the parent's peak."""

    def __init__(self) -> None:
        self._status = os.open("/proc/self/status", os.O_RDONLY)
        self._known = self._bytes()

    def growth_bytes(self) -> int:
        """The growth of the peak since the last call."""
        before = self._known
        self._known = self._bytes()
        return self._known - before

    def _bytes(self) -> int:
        _, _, after = os.pread(self._status, 4096, 0).partition(b"VmHWM:")
        return int(after.split(maxsplit=1)[0]) * 1024


def _memory_folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None

"""Runs parsers in a child process, in batches of thousands of inputs.

The parent notices an input that does not end, and one that ends the process, by a counter in shared
memory. It starts another child, which goes on behind that input. An input whose parser takes much
memory is a failure, too.
"""

from __future__ import annotations

import multiprocessing
import resource
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
FAILURES_MAX = 20  # of a batch: more of them tell nothing new
_spawn = multiprocessing.get_context("spawn")  # threads of the parent hold locks


class Outcome(NamedTuple):
    """The outcome of a batch. `rss_bytes` is the memory of the process at its end."""

    failures: list[str]
    rss_bytes: int


class _Batch(NamedTuple):
    name: str
    seed: int
    size: int
    first: int  # index of the first input that is given


Targets = Callable[[Path], Mapping[str, Any]]


class ParserProcess:
    """A child process that gives inputs to the targets that a function makes of a folder."""

    def __init__(self, make_targets: Targets) -> None:
        self._make_targets = make_targets
        self._folder = tempfile.TemporaryDirectory(dir=_memory_folder())
        self._index = _spawn.Value("Q", 0)
        self._start()

    def run(self, name: str, seed: int, size: int) -> Outcome:
        """Gives a target the inputs of a batch."""
        failures: list[str] = []
        first = 0
        while True:
            self._index.value = first
            self._pipe.send(_Batch(name, seed, size, first))
            if (ended := self._wait()) is None:
                told, rss_bytes = self._pipe.recv()
                return Outcome(failures + told, rss_bytes)
            failures.append(f"input {self._index.value} of seed {seed}: {ended}")
            first = self._index.value + 1
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
        arguments = (self._make_targets, Path(self._folder.name), theirs, self._index)
        self._process = _spawn.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def _wait(self) -> str | None:
        """Returns why the child ended before the batch did, or None when the batch is done."""
        seen, since = -1, time.monotonic()
        while not self._pipe.poll(0.2):
            if not self._process.is_alive():
                return f"the process ended with {self._process.exitcode}"
            if (index := self._index.value) != seen or not index:  # making inputs takes time, too
                seen, since = index, time.monotonic()
            elif time.monotonic() - since > HANG_S:
                return f"no end within {HANG_S:g} s"
        return None


def _serve(make_targets: Targets, folder: Path, pipe: Connection, index: Any) -> None:
    targets = make_targets(folder)
    while True:
        batch = _Batch(*pipe.recv())
        target = targets[batch.name]
        inputs = batch_of(target.source, batch.seed, batch.size)
        failures: list[str] = []
        for number in range(batch.first, len(inputs)):
            index.value = number + 1
            before = _peak_bytes()
            try:
                target.check(inputs[number])
                grown = _peak_bytes() - before
                assert grown < GROWTH_OF_INPUT_BYTES_MAX, f"it took {grown >> 20} MiB"
            except Exception as error:
                failures.append(f"{inputs[number]!r:.400}: {error!r:.1000}")
        pipe.send((failures[:FAILURES_MAX], psutil.Process().memory_info().rss))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _memory_folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None

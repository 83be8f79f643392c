"""Measures how much longer a decode step takes while a tier's threads move blocks.

    python -m benchmarks.tiers.steps [--tokens 4000] [--rounds 40] [--threads 1]

Two streams decode on one engine. In turn, steps are timed with nothing else, while a long prompt is
loaded from its tier, and while a thread copies memory without a pause, which is more than any tier
does. Only steps in which nothing but the streams was computed count, and of loads those during
which a load was under way all the time. Medians are compared round by round: a stream's context
grows, and with it the time of a step. Writes benchmarks/results/tier_steps.json.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np

from benchmarks.shared.requests import random_prompt
from benchmarks.tiers.chats import BLOCK, Client, Measured, client_of
from tandem.engine.engine import Engine
from tandem_bench.framework import RESULTS, Report, options, run_main

STREAMS = 2
STEPS = 8  # of each kind in a round
COPY_BYTES = 32 << 20


class Copier:
    """A thread that copies memory without a pause, as long as it is open."""

    def __init__(self) -> None:
        self._source, self._target = (np.ones(COPY_BYTES, np.uint8) for _ in range(2))
        self._is_open = threading.Event()
        self.num_copied = 0
        threading.Thread(target=self._run, daemon=True).start()

    def open(self) -> None:
        self._is_open.set()

    def close(self) -> None:
        self._is_open.clear()

    def _run(self) -> None:
        while self._is_open.wait():
            np.copyto(self._target, self._source)
            self.num_copied += COPY_BYTES


class Steps:
    """Decode steps of one engine, timed in ms."""

    def __init__(self, client: Client, prompt: list[int], rounds: int) -> None:
        self._engine: Engine = client._engine
        self._prompt = prompt
        num_tokens = rounds * 8 * STEPS
        for number in range(STREAMS):
            client._add(f"s{number}", random_prompt(Random(number), 64), num_tokens)
        self._client = client
        self._copier = Copier()
        while self._engine.load().num_running < STREAMS:
            self._engine.step()

    def quiet(self) -> list[float]:
        return [self._step() for _ in range(STEPS)]

    def copying(self) -> list[float]:
        self._copier.open()
        try:
            self._step()
            return [self._step() for _ in range(STEPS)]
        finally:
            self._copier.close()
            self._step()

    def loading(self) -> list[float]:
        """Loads the prompt, which the pool has not, and drops it before it is computed."""
        engine, times = self._engine, list[float]()
        engine._kv.drop_cached()
        self._client._add("long", [*self._prompt, 1, 2, 3], 1, returns=True)
        self._step()
        while engine._tiers._loads:
            took = self._step()
            if engine._tiers._loads:
                times.append(took)
        engine.remove("long")
        while engine._tiers.is_busy:
            self._step()
        return times

    def _step(self) -> float:
        start = time.perf_counter()
        self._engine.step()
        return 1e3 * (time.perf_counter() - start)


def measure(kind: str, args: Options) -> dict[str, Any]:
    """Returns how many times as long steps take as quiet ones of the same round."""
    prompt = random_prompt(Random(9), args.tokens)
    num_blocks = STREAMS * ((64 + 8 * STEPS * args.rounds) // BLOCK + 2) + args.tokens // BLOCK + 20
    with client_of(kind, num_blocks, args.threads, Measured()) as client:
        client.ask(prompt, returns=True)
        steps = Steps(client, prompt, args.rounds)
        ways: dict[str, Callable[[], list[float]]]
        ways = {"loading": steps.loading, "copying": steps.copying}
        times: dict[str, list[float]] = {name: [] for name in ("quiet", *ways)}
        ratios: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(args.rounds):
            for name, way in ways.items():
                quiet = steps.quiet()
                found = way()
                times["quiet"] += quiet
                times[name] += found
                ratios[name] += [each / statistics.median(quiet) for each in found]
    row: dict[str, Any] = {"quiet_ms": statistics.median(times["quiet"])}
    for name, found in ratios.items():
        row[name] = {"steps": len(found), "steps_a_load": len(found) / args.rounds}
        if len(found) > 1:
            row[name] |= {"p50": statistics.median(found), "ms": statistics.median(times[name])}
    print(kind, json.dumps(row), flush=True)
    return row


@options
class Options:
    tokens: int = 4_000
    """Tokens of the prompt that is loaded."""
    rounds: int = 40
    kinds: tuple[Literal["host", "disk"], ...] = ("host", "disk")
    threads: int = 1
    output: Path = RESULTS / "tier_steps.json"


def main(options: Options = Options()) -> None:
    report = Report(options.output)
    rows = {kind: measure(kind, options) for kind in options.kinds}
    report.write(rows=rows, arguments=options)


if __name__ == "__main__":
    run_main(main)

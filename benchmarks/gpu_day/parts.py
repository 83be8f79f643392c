"""The parts of `benchmarks.gpu_day`, most valuable first, and the program that runs one of them.

    python -m benchmarks.gpu_day.parts NAME [--stand-in]

prints one line for each result, which `benchmarks.gpu_day` reads: `ROW_MARK` and a JSON object. Its
`ratio` is the share of the goal's measure that was reached, and `goal` the least share that is
wanted.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
from dataclasses import dataclass
from typing import Any

ROW_MARK = "row: "


@dataclass(frozen=True)
class Part:
    """A part of the day. `module` has a function `run(stand_in)`, which is imported only when it
    runs, so that a part whose packages are missing does not stop the others."""

    module: str
    limit_s: float


PARTS = {
    "read": Part("benchmarks.gpu_day.read", 45),
    "pair": Part("benchmarks.gpu_day.pair", 100),
    "restart": Part("benchmarks.gpu_day.restart", 60),
    "decode": Part("benchmarks.gpu_day.decode", 100),
    "attention": Part("benchmarks.gpu_day.attention", 30),
    "quantized": Part("benchmarks.gpu_day.quantized", 60),
    "tiers": Part("benchmarks.gpu_day.tiers", 25),
    "tuned": Part("benchmarks.gpu_day.tuned", 40),
}


def add_row(
    what: str, *, ratio: float | None = None, goal: float | None = None, **more: Any
) -> None:
    """Reports a result: `ratio` of at least `goal` is wanted. `more` has the figures behind it."""
    row = {"what": what, "ratio": ratio, "goal": goal, **more}
    print(ROW_MARK + json.dumps(row), flush=True)


def main() -> None:
    # An exception stops what the part has started, such as Redis.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    name, *more = sys.argv[1:]
    importlib.import_module(PARTS[name].module).run(stand_in="--stand-in" in more)


if __name__ == "__main__":
    main()

"""The first day on a GPU: checks and measures all that a machine without one cannot, in minutes.

    python -m benchmarks.gpu_day                          all parts, most valuable first, 6 minutes
    python -m benchmarks.gpu_day --parts read,restart     some of them, again
    python -m benchmarks.gpu_day --stand-in               tiny sizes on a CPU, without meaning

Each part is a process of its own with a time limit, so that one that fails or hangs does not stop
the others. Each result is written as it comes, to benchmarks/results/gpu_day.json. A run of some
parts replaces only the results of these parts. The status is 1 if a part failed or a goal was
missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.parts import PARTS, ROW_MARK
from tandem_bench.framework import RESULTS, read, write

_LEAST_S = 5.0  # no part starts with less time left
_STOP_S = 10.0  # a part that is out of time gets so long to stop what it has started
_PATIENCE = 5  # a CPU gets so many times as long as a GPU
_VERSIONS = ("torch", "triton", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")


class Day:
    """The results of a run, and the file that has them."""

    def __init__(self, path: Path, card: str, *, stand_in: bool) -> None:
        self._path = path
        before = read(path)
        same = before.get("device") == card
        self._results: dict[str, Any] = {
            "device": card,
            "stand_in": stand_in,
            "versions": {"python": platform.python_version(), **_versions()},
            "parts": before["parts"] if same else {},
        }
        self.is_good = True

    def run(self, name: str, limit_s: float, *, stand_in: bool) -> None:
        """Runs a part for at most `limit_s` seconds."""
        print(f"--- {name} (at most {limit_s:.0f} s)", flush=True)
        started = time.monotonic()
        part: dict[str, Any] = {"rows": []}
        self._results["parts"][name] = part
        environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if stand_in else {})}
        process = subprocess.Popen(
            command(name, stand_in=stand_in),
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            _stop(process)

        timer = threading.Timer(limit_s, end)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(ROW_MARK):
                    self._add(part, json.loads(line.removeprefix(ROW_MARK)))
                else:
                    print(line, end="", flush=True)
            status = process.wait()
        finally:
            timer.cancel()
            _stop(process)
        part["seconds"] = round(time.monotonic() - started, 1)
        if is_late.is_set():
            part["error"] = f"it did not end within {limit_s:.0f} s"
        elif status:
            part["error"] = f"it ended with status {status}"
        if error := part.get("error"):
            self.is_good = False
            print(f"{name} FAILED: {error}", flush=True)
        self._write()

    def skip(self, name: str) -> None:
        print(f"--- {name}: not run, because no time is left", flush=True)
        self._results["parts"][name] = {"rows": [], "error": "not run: no time was left"}
        self.is_good = False
        self._write()

    def _add(self, part: dict[str, Any], row: dict[str, Any]) -> None:
        part["rows"].append(row)
        self._write()
        goal, ratio = row.get("goal"), row.get("ratio")
        missed = goal is not None and (ratio is None or ratio < goal)
        self.is_good &= not missed
        figures = f"{ratio:8.1%}" if ratio is not None else " " * 8
        wanted = f"   goal {goal:.0%}{': MISSED' if missed else ''}" if goal is not None else ""
        print(f"{row['what']:64}{figures}{wanted}", flush=True)

    def _write(self) -> None:
        write(self._path, self._results)


def command(name: str, *, stand_in: bool) -> list[str]:
    """Returns the command that runs a part."""
    more = ["--stand-in"] if stand_in else []
    return [sys.executable, "-m", "benchmarks.gpu_day.parts", name, *more]


def _stop(process: subprocess.Popen[str]) -> None:
    """Ends a part, and then kills what it has started and not stopped."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _versions() -> dict[str, str]:
    found = {}
    for name in _VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _card() -> str:
    """Returns the name of the first GPU. A process of its own asks, so that this one holds no
    memory of the GPU."""
    program = (
        "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated; default: all")
    parser.add_argument("--minutes", type=float, default=6.0, help="time of all parts together")
    parser.add_argument("--stand-in", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/gpu_day.json")
    options = parser.parse_args()
    names = options.parts.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"unknown parts {sorted(unknown)}; there are {', '.join(PARTS)}")
    card = "stand-in" if options.stand_in else _card()
    if not card:
        sys.exit("no CUDA device; --stand-in runs tiny sizes on a CPU")
    out = options.out or RESULTS / ("gpu_day_stand_in.json" if options.stand_in else "gpu_day.json")
    day = Day(out, card, stand_in=options.stand_in)
    patience = _PATIENCE if options.stand_in else 1
    ends_at = time.monotonic() + 60 * options.minutes * patience
    for name in sorted(names, key=list(PARTS).index):
        left_s = ends_at - time.monotonic()
        if left_s < _LEAST_S:
            day.skip(name)
        else:
            limit_s = min(PARTS[name].limit_s * patience, left_s)
            day.run(name, limit_s, stand_in=options.stand_in)
    print(f"written to {out}")
    sys.exit(not day.is_good)


if __name__ == "__main__":
    main()

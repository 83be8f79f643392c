"""Measures the first start of a new user: from `git clone` to the first token, with empty caches.

    python -m benchmarks.cluster.first_start [--repeats 3]

Each round clones the repository into a new folder, runs `make up` there with an empty pip cache, an
empty cache of objects and no model, sends a request, and starts the cluster a second time. The
stages are those that the install prints. `received` is what the network interfaces received
meanwhile, so nothing else should use the network. Run it on a quiet machine.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import httpx
import psutil

from benchmarks.shared.cluster import ROOT, free_port, wait_for
from tandem_bench.framework import RESULTS, Report, options, run_main, table

DEADLINE_S = 1800.0
_STAGE = re.compile(r"^ *(\d+) s  (\d of \d|installed)", re.MULTILINE)
_COMPILED = re.compile(r"are compiled \((\d+) s\)")


@options
class Options:
    repeats: int = 3
    output: Path = RESULTS / "first_start.json"


def main(options: Options = Options()) -> None:
    report = Report(options.output)
    rounds = [_measure() for _ in range(options.repeats)]
    medians = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    report.write(medians=medians, rounds=rounds)
    print(table("stage | median", [(name, f"{value:.1f}") for name, value in medians.items()]))


def _measure() -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="first-start-") as name:
        folder = Path(name) / "tandem"
        cache = Path(name) / "cache"
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PIP_NO_CACHE_DIR": "1"}
        # Not of the environment in which this program runs.
        environment.pop("VIRTUAL_ENV", None)
        began = time.perf_counter()
        received = _received_bytes()
        subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
        cloned_s = time.perf_counter() - began
        first_ready_s, first_token_s, screen = _start(folder, environment)
        installed_s = float(dict(map(reversed, _STAGE.findall(screen)))["installed"])
        compiled = _COMPILED.search(screen)
        second_ready_s, _, _ = _start(folder, environment)
        return {
            "clone s": cloned_s,
            "packages and kernels s": installed_s,
            "of these, compiling beside s": float(compiled[1]) if compiled else 0.0,
            "received MB": (_received_bytes() - received) / 1e6,
            "model and start s": first_ready_s - installed_s,
            "first token s": first_token_s - first_ready_s,
            "git clone to first token s": cloned_s + first_token_s,
            "second start s": second_ready_s,
            "lines until the ready screen": len(screen[: screen.index("\nready")].splitlines()),
        }


def _start(folder: Path, environment: dict[str, str]) -> tuple[float, float, str]:
    """Runs `make up`. Returns the seconds until requests are served, those until the first token,
    and what was printed."""
    ports = {name: free_port() for name in ("port", "grpc-port", "admin-port", "admin-grpc-port")}
    arguments = " ".join(f"--{name} {port}" for name, port in ports.items())
    screen = folder.parent / "screen"
    began = time.perf_counter()
    with screen.open("wb") as out:
        process = subprocess.Popen(
            ["make", "up", f"ARGS={arguments}"],
            cwd=folder,
            env=environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{ports['port']}"

        def is_ready() -> bool:
            assert process.poll() is None, screen.read_text()
            return "\nready after" in screen.read_text()

        wait_for(is_ready, deadline_s=DEADLINE_S, what="the cluster")
        ready_s = time.perf_counter() - began
        body = {"prompt": "The sky is", "max_tokens": 1}
        model = httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]
        httpx.post(
            f"{url}/v1/completions", json={**body, "model": model}, timeout=60
        ).raise_for_status()
        return ready_s, time.perf_counter() - began, screen.read_text()
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)


def _received_bytes() -> int:
    counters = psutil.net_io_counters(pernic=True)
    return sum(each.bytes_recv for name, each in counters.items() if name != "lo")


if __name__ == "__main__":
    run_main(main)

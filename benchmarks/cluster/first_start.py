"""Measures the first start of a new user: from `git clone` to the first token, with empty caches.

    python -m benchmarks.cluster.first_start [--repeats 3] [--busy-starts 10]

Each round clones the repository into a new folder, runs `make up` there with an empty pip cache, an
empty cache of objects and no model, sends a request, and starts the cluster a second time. The
stages are those that the install prints. `received` is what the network interfaces received
meanwhile, so nothing else should use the network. Run it on a quiet machine.

With `--busy-starts`, this checkout is then started so many times while eight busy loops run beside
it at the same priority. Each start has to end with an answer and with Ray's head up.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

from benchmarks.shared.cluster import ROOT, free_port, wait_for
from tandem_bench.framework import RESULTS, Report, options, run_main, table

DEADLINE_S = 1800.0
BUSY_LOOPS = 8
_STAGE = re.compile(r"^ *(\d+) s  (\d of \d|installed)", re.MULTILINE)
_COMPILED = re.compile(r"are compiled \((\d+) s\)")


@options
class Options:
    repeats: int = 3
    busy_starts: int = 0
    output: Path = RESULTS / "first_start.json"


def main(options: Options = Options()) -> None:
    report = Report(options.output)
    if options.repeats:
        rounds = [_measure() for _ in range(options.repeats)]
        medians = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
        report.write(medians=medians, rounds=rounds)
        print(table("stage | median", [(name, f"{value:.1f}") for name, value in medians.items()]))
    if options.busy_starts:
        seconds = _start_beside_busy_loops(options.busy_starts)
        report.write(busy_loops=BUSY_LOOPS, busy_starts_s=seconds)
        names = ("until requests are served", "until Ray's head is up")
        for name, each in zip(names, zip(*seconds, strict=True), strict=True):
            print(
                f"{len(each)} starts beside {BUSY_LOOPS} busy loops: {min(each):.0f} to "
                f"{max(each):.0f} s {name}, median {statistics.median(each):.0f} s"
            )


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


def _start_beside_busy_loops(starts: int) -> list[tuple[float, float]]:
    """Returns the seconds until each start served requests, and until its Ray head was up."""
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY_LOOPS)
    ]
    try:
        with tempfile.TemporaryDirectory(prefix="busy-start-") as name:
            checkout = Path(name) / "tandem"
            checkout.symlink_to(ROOT)
            seconds = []
            for _ in range(starts):
                served_s, ray_s, _ = _start(checkout, dict(os.environ), until="Ray's head is up")
                seconds.append((served_s, ray_s))
            return seconds
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _start(folder: Path, environment: dict[str, str], until: str = "") -> tuple[float, float, str]:
    """Runs `make up`. Returns the seconds until requests are served, those until the first token
    was received and `until` was printed, and what was printed."""
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

        def has_printed(text: str) -> bool:
            assert process.poll() is None, screen.read_text()
            return text in screen.read_text()

        wait_for(lambda: has_printed("\nready after"), deadline_s=DEADLINE_S, what="the cluster")
        ready_s = time.perf_counter() - began
        body = {"prompt": "The sky is", "max_tokens": 1}
        model = httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]
        httpx.post(
            f"{url}/v1/completions", json={**body, "model": model}, timeout=60
        ).raise_for_status()
        wait_for(lambda: has_printed(until), deadline_s=DEADLINE_S, what=until)
        return ready_s, time.perf_counter() - began, screen.read_text()
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)


def _received_bytes() -> int:
    counters = psutil.net_io_counters(pernic=True)
    return sum(each.bytes_recv for name, each in counters.items() if name != "lo")


if __name__ == "__main__":
    run_main(main)

"""Measures a new user's first minutes: time to the first token, idle CPU, a repeated long prompt.

    python benchmarks/first_look.py [--repeats 5]

Starts `tandem up` (one prefill and one decode worker) on free ports, measures, stops it. Writes
benchmarks/results/first_look.json and prints the table of docs/measurements.md. Run it on a quiet
machine; the model must have been converted once (any earlier start does that).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import psutil

RESULTS = Path(__file__).parent / "results" / "first_look.json"
START_DEADLINE_S = 120.0
IDLE_S = 20.0
PROMPT_TOKENS = 1500
BINARIES = Path(sys.executable).parent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    names = ("port", "grpc-port", "admin-port", "admin-grpc-port")
    ports = {name: _free_port() for name in names}
    options = [word for name, port in ports.items() for word in (f"--{name}", str(port))]
    began = time.perf_counter()
    launcher = subprocess.Popen([BINARIES / "tandem", "up", *options], stdout=subprocess.DEVNULL)
    try:
        with (
            httpx.Client(base_url=f"http://127.0.0.1:{ports['port']}", timeout=120) as client,
            httpx.Client(base_url=f"http://127.0.0.1:{ports['admin-port']}") as admin,
        ):
            result: dict[str, Any] = {"start": _measure_start(client, began)}
            _complete(client, [7] * 600, max_tokens=4)  # joins the pair and warms both engines
            result["idle_cpu_percent"] = _measure_idle(launcher.pid)
            result["repeated_prompt"] = _measure_repeats(client, admin, repeats)
    finally:
        launcher.send_signal(signal.SIGINT)
        launcher.wait(30)
    result["load_average"] = os.getloadavg()
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def _measure_start(client: httpx.Client, began: float) -> dict[str, float]:
    while True:
        try:
            if client.get("/ready").status_code == 200:
                break
        except httpx.TransportError:
            if time.perf_counter() - began > START_DEADLINE_S:
                raise
        time.sleep(0.02)
    ready = time.perf_counter()
    _time_to_first_token(client, [504, 3575, 282, 4649, 314])
    return {"ready_s": ready - began, "first_token_s": time.perf_counter() - began}


def _measure_idle(launcher_pid: int) -> dict[str, float]:
    """Percent of one core over IDLE_S, by kind of process; `tandem` is the sum of our own."""
    processes = _cluster(launcher_pid)
    before = {p: _cpu_s(p) for p in processes}
    time.sleep(IDLE_S)
    used: dict[str, float] = defaultdict(float)
    for p in processes:
        kind = _kind(p)
        percent = (_cpu_s(p) - before[p]) / IDLE_S * 100
        used[kind] += percent
        if kind not in ("ray", "redis"):
            used["tandem"] += percent
    return {kind: round(percent, 2) for kind, percent in sorted(used.items())}


def _measure_repeats(client: httpx.Client, admin: httpx.Client, repeats: int) -> dict[str, Any]:
    first, again, moved_first, moved_again, cached = [], [], [], [], []
    for n in range(repeats):
        prompt = [(token * 31 + n * 7919) % 40_000 + 100 for token in range(PROMPT_TOKENS)]
        start = _bytes_pulled(admin)
        first.append(_time_to_first_token(client, prompt))
        middle = _bytes_pulled(admin)
        again.append(_time_to_first_token(client, prompt))
        moved_first.append(middle - start)
        moved_again.append(_bytes_pulled(admin) - middle)
        usage = _complete(client, prompt, max_tokens=1)["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "cached_tokens": min(cached),
        "ttft_first_ms": round(statistics.median(first) * 1000, 1),
        "ttft_again_ms": round(statistics.median(again) * 1000, 1),
        "ratio": round(statistics.median(a / b for a, b in zip(first, again, strict=True)), 1),
        "bytes_first": statistics.median(moved_first),
        "bytes_again": statistics.median(moved_again),
    }


def _time_to_first_token(client: httpx.Client, prompt: list[int]) -> float:
    body = {"prompt": prompt, "max_tokens": 2, "stream": True, "ignore_eos": True}
    began = time.perf_counter()
    elapsed = 0.0
    with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {") and not elapsed:
                elapsed = time.perf_counter() - began
    return elapsed


def _complete(client: httpx.Client, prompt: list[int], *, max_tokens: int) -> dict[str, Any]:
    response = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": max_tokens})
    response.raise_for_status()
    return dict(response.json())


def _bytes_pulled(admin: httpx.Client) -> float:
    total = 0.0
    for worker in admin.get("/v1/cluster").json()["workers"]:
        text = httpx.get(f"http://{worker['metrics_address']}/metrics").text
        for line in text.splitlines():
            if line.startswith("tandem_kv_bytes_pulled_total{"):
                total += float(line.rsplit(" ", 1)[1])
    return total


def _cluster(launcher_pid: int) -> list[psutil.Process]:
    """The launcher and all that carry its cluster's id."""
    found, cluster_id = [], ""
    for process in psutil.process_iter():
        try:
            environment, parents = process.environ(), [p.pid for p in process.parents()]
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
        if launcher_pid in parents and "TANDEM_CLUSTER_ID" in environment:
            cluster_id = environment["TANDEM_CLUSTER_ID"]
    for process in psutil.process_iter():
        try:
            same = process.environ().get("TANDEM_CLUSTER_ID") == cluster_id
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
        if same or process.pid == launcher_pid:
            found.append(process)
    return found


def _kind(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    for kind, marks in {
        "agents and controller": ("ray::Agent", "ray::PoolController"),
        "router": ("tandem.router", "multiprocessing"),
        "workers": ("tandem.worker",),
        "redis": ("valkey-server", "redis-server"),
        "ray": ("ray",),
    }.items():
        if any(mark in command for mark in marks):
            return kind
    return "launcher and guardian"


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()

"""Tests whether a tenant can tell by its TTFT that another one sent the same prompt.

    python benchmarks/tenants.py [--pairs 100] [--tokens 512]

A cluster of `tandem up` with one prefill and one decode worker, and an API key of each tenant. For
each pair, one prompt each, in turn (which comes first alternates):

    known   tenant A asks a prompt, then B the same one: B's time is taken
    fresh   tenant A asks another prompt, then B one that nobody asked: B's time is taken
    own     tenant A asks, then A again: what sharing would look like, so that the test can fail

Two tests of `known` and of `own` against `fresh`, with 20,000 permutations each: of the difference
of the medians (labels exchanged at random), and of the median of the differences within a pair
(signs exchanged at random). Also how many of B's prompt tokens were cached: 0. Writes
benchmarks/results/tenants.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.harness.cluster import START_DEADLINE_S, free_port, wait_for

RESULTS = Path(__file__).parent / "results" / "tenants.json"
KINDS = ("known", "fresh", "own")
PERMUTATIONS = 20_000
VOCABULARY = 49_000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--warm-up", type=int, default=5, help="pairs that are not counted")
    parser.add_argument("--json", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    with started_cluster() as (url, admin), httpx.Client(base_url=url, timeout=120) as client:
        keys = {tenant: create_key(admin, tenant) for tenant in ("tenant-a", "tenant-b")}
        rounds = arguments.pairs + arguments.warm_up
        samples = [
            measure_pair(client, keys, rng, number, arguments.tokens)
            for number in track(range(rounds), description="pairs")
        ][arguments.warm_up :]
    summary = {"tokens": arguments.tokens, **summarize(samples, rng)}
    arguments.json.write_text(json.dumps({**summary, "pairs": samples}, indent=1) + "\n")
    print_summary(summary)


@contextmanager
def started_cluster() -> Iterator[tuple[str, str]]:
    """Runs `tandem up`; yields the router's public and admin URLs once it is ready."""
    port, admin = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "tandem.ops.cli", "up", "--prefill", "1", "--decode", "1"]
    command += ["--admin-port", str(admin), "--admin-grpc-port", str(free_port())]
    command += ["--die-with-parent", str(os.getpid())]
    command += ["--port", str(port), "--grpc-port", str(free_port()), "--num-blocks", "4000"]
    with tempfile.TemporaryFile() as screen:
        cluster = subprocess.Popen([*command, "--threads", "1"], stdout=screen, stderr=screen)

        def ready() -> bool:
            if cluster.poll() is not None:
                screen.seek(0)
                raise RuntimeError(screen.read().decode())
            try:
                return httpx.get(f"{url}/ready", timeout=5).status_code == 200
            except httpx.TransportError:
                return False

        try:
            wait_for(ready, deadline_s=START_DEADLINE_S, what="readiness of the cluster")
            yield url, f"http://127.0.0.1:{admin}"
        finally:
            cluster.terminate()
            cluster.wait(60)


def create_key(url: str, tenant: str) -> str:
    """Creates a key of a tenant, as an operator does."""
    command = [sys.executable, "-m", "tandem.ops.cli", "keys", "create", "--tenant", tenant]
    done = subprocess.run([*command, "--url", url], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def measure_pair(
    client: httpx.Client, keys: dict[str, str], rng: np.random.Generator, number: int, size: int
) -> dict[str, dict[str, float]]:
    """Time to first token (ms) and cached tokens of each kind."""
    kinds = KINDS[number % 3 :] + KINDS[: number % 3]
    return {kind: measure(client, keys, rng, kind, size) for kind in kinds}


def measure(
    client: httpx.Client, keys: dict[str, str], rng: np.random.Generator, kind: str, size: int
) -> dict[str, float]:
    first, other = rng.integers(100, VOCABULARY, (2, size)).tolist()
    ask(client, first, keys["tenant-a"])
    ttft_ms, cached = ask(
        client,
        other if kind == "fresh" else first,
        keys["tenant-a" if kind == "own" else "tenant-b"],
    )
    return {"ttft_ms": ttft_ms, "cached_tokens": cached}


def ask(client: httpx.Client, prompt: list[int], key: str) -> tuple[float, int]:
    """Milliseconds to the first token, and cached tokens of the prompt."""
    body = {
        "prompt": prompt,
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started, first_s, cached = time.perf_counter(), 0.0, -1
    headers = {"authorization": f"Bearer {key}"}
    with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            first_s = first_s or time.perf_counter() - started
            usage = json.loads(line.removeprefix("data: ")).get("usage")
            if usage:
                cached = usage["prompt_tokens_details"]["cached_tokens"]
    return first_s * 1000, cached


def summarize(
    samples: list[dict[str, dict[str, float]]], rng: np.random.Generator
) -> dict[str, Any]:
    ttft = {kind: np.array([s[kind]["ttft_ms"] for s in samples]) for kind in KINDS}
    return {
        "num_pairs": len(samples),
        "ttft_ms_median": {kind: float(np.median(t)) for kind, t in ttft.items()},
        "cached_tokens_max": {
            kind: max(s[kind]["cached_tokens"] for s in samples) for kind in KINDS
        },
        "p_medians": {k: p_medians(ttft[k], ttft["fresh"], rng) for k in ("known", "own")},
        "p_pairs": {k: p_pairs(ttft[k], ttft["fresh"], rng) for k in ("known", "own")},
    }


def p_medians(one: np.ndarray, other: np.ndarray, rng: np.random.Generator) -> float:
    """Two-sided, of the difference of the medians, labels exchanged."""
    seen = abs(np.median(one) - np.median(other))
    mixed = rng.permuted(np.tile(np.concatenate((one, other)), (PERMUTATIONS, 1)), axis=1)
    found = np.abs(
        np.median(mixed[:, : len(one)], axis=1) - np.median(mixed[:, len(one) :], axis=1)
    )
    return float((1 + np.sum(found >= seen)) / (1 + PERMUTATIONS))


def p_pairs(one: np.ndarray, other: np.ndarray, rng: np.random.Generator) -> float:
    """Two-sided, of the median of the differences, signs exchanged."""
    differences = one - other
    signs = rng.choice((-1.0, 1.0), (PERMUTATIONS, len(differences)))
    found = np.abs(np.median(signs * differences, axis=1))
    return float((1 + np.sum(found >= abs(np.median(differences)))) / (1 + PERMUTATIONS))


def print_summary(summary: dict[str, Any]) -> None:
    medians, cached = summary["ttft_ms_median"], summary["cached_tokens_max"]
    print(f"{summary['num_pairs']} pairs of prompts of {summary['tokens']} tokens")
    for kind in KINDS:
        print(f"  {kind:5}  TTFT median {medians[kind]:7.1f} ms, cached at most {cached[kind]}")
    for kind in ("known", "own"):
        print(
            f"  {kind} against fresh: p = {summary['p_medians'][kind]:.4f} (medians), "
            f"{summary['p_pairs'][kind]:.4f} (within pairs)"
        )


if __name__ == "__main__":
    main()

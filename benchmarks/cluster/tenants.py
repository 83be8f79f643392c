"""Tests whether a tenant can tell by its TTFT that another one sent the same prompt.

    python -m benchmarks.cluster.tenants [--pairs 100] [--tokens 512]

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

from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from benchmarks.shared.cluster import up
from benchmarks.shared.requests import send_alone
from tandem_bench.framework import RESULTS, Report, options, run_main

KINDS = ("known", "fresh", "own")
PERMUTATIONS = 20_000
VOCABULARY = 49_000


@options
class Options:
    pairs: int = 100
    tokens: int = 512
    """Tokens of a prompt."""
    warm_up: int = 5
    """Pairs that are not counted."""
    output: Path = RESULTS / "tenants.json"


def main(options: Options = Options()) -> None:
    report, rng = Report(options.output), np.random.default_rng(0)
    with up("--prefill", "1", "--decode", "1", "--num-blocks", "4000") as cluster:
        keys = {
            tenant: cluster.tandem("keys", "create", "--tenant", tenant)
            for tenant in ("tenant-a", "tenant-b")
        }
        rounds = options.pairs + options.warm_up
        samples = [
            measure_pair(cluster.url, keys, rng, number, options.tokens)
            for number in track(range(rounds), description="pairs")
        ][options.warm_up :]
    summary = {"tokens": options.tokens, **summarize(samples, rng)}
    report.write(**summary, pairs=samples)
    print_summary(summary)


def measure_pair(
    url: str, keys: dict[str, str], rng: np.random.Generator, number: int, size: int
) -> dict[str, dict[str, float]]:
    """Returns the TTFT in ms and the cached tokens of each kind."""
    kinds = KINDS[number % 3 :] + KINDS[: number % 3]
    return {kind: measure(url, keys, rng, kind, size) for kind in kinds}


def measure(
    url: str, keys: dict[str, str], rng: np.random.Generator, kind: str, size: int
) -> dict[str, float]:
    first, other = rng.integers(100, VOCABULARY, (2, size)).tolist()
    send_alone(url, first, 2, key=keys["tenant-a"])
    prompt = other if kind == "fresh" else first
    seen = send_alone(url, prompt, 2, key=keys["tenant-a" if kind == "own" else "tenant-b"])
    return {"ttft_ms": 1000 * seen.ttft_s, "cached_tokens": seen.num_cached}


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
    run_main(main)

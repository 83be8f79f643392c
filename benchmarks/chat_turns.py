"""The second turn of a chat: its prefix is pulled from the decode worker, not computed again.

    python benchmarks/chat_turns.py [--repeats 5] [--follow-ups 1000,800]

A chat's first turn (a prompt and 400 tokens made by decode) and a long follow-up, in all 4,000
tokens in the second turn. Time to its first token, each beside a prompt of 4,000 tokens that nobody
has seen:

    same      the prefill worker of the first turn: it has the prompt, and pulls what decode made
    another   a prefill worker that was started after the first turn: it pulls the whole prefix

One core for each of the two workers at work. Writes benchmarks/results/chat_turns.json and prints
the table of docs/measurements.md.
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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent))

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tests.harness.client import metric
from tests.harness.cluster import LocalCluster, wait_for

RESULTS = Path(__file__).parent / "results" / "chat_turns.json"
TOTAL, MADE = 4000, 400  # tokens of the second turn; those of the first one's answer
KINDS = ("same", "another")
PULLED = "tandem_prefix_blocks_pulled_total"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--follow-ups", default="1000,800", help="tokens of the second question")
    arguments = parser.parse_args()
    repeats = arguments.repeats
    follow_ups = [int(length) for length in arguments.follow_ups.split(",")]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis = EmbeddedRedis(folder / "redis")
        redis.start()
        stack.callback(redis.stop)
        # Every chat stays in the decode worker's pool until its second turn.
        options = ("--prefill-at", "remote", "--kv-memory", str(4 << 30))
        cluster = LocalCluster(redis, folder, options=options)
        stack.callback(cluster.close)
        cluster.start_router()
        cluster.start_worker("decode-0", "decode", "--cores", "1")
        cluster.start_worker("prefill-0", "prefill", "--cores", "0")
        cluster.wait_ready()
        time_to_first_token(cluster, tokens("warm-up", 600))
        chats = {
            (kind, follow_up): [
                first_turn(cluster, f"{kind} {follow_up} {number}", TOTAL - MADE - follow_up)
                for number in range(repeats)
            ]
            for kind in KINDS
            for follow_up in follow_ups
        }
        rows = []
        for kind in KINDS:
            if kind == "another":
                replace_prefill_worker(cluster)
            for follow_up in follow_ups:
                turns = [second_turn(cluster, c, follow_up) for c in chats[kind, follow_up]]
                rows.append({"prefill_worker": kind, "follow_up": follow_up, **summary(turns)})
    result = {"tokens": {"total": TOTAL, "made": MADE}, "rows": rows}
    result["load_average"] = os.getloadavg()
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print_table(rows)


def tokens(seed: str, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 40_000) for _ in range(count)]


def first_turn(cluster: LocalCluster, seed: str, length: int) -> list[int]:
    """The chat after its first turn: prompt and answer."""
    prompt = tokens(seed, length)
    body = {"prompt": prompt, "max_tokens": MADE, "ignore_eos": True, "return_token_ids": True}
    response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=300)
    response.raise_for_status()
    return prompt + response.json()["choices"][0]["token_ids"]


def second_turn(cluster: LocalCluster, chat: list[int], follow_up: int) -> dict[str, float]:
    """Measures the chat's follow-up, and a prompt of the same length that is new to all workers."""
    seed = str(hash(tuple(chat)))
    before = blocks_pulled(cluster)
    turn_s = time_to_first_token(cluster, chat + tokens(seed, follow_up))
    pulled = blocks_pulled(cluster) - before
    fresh_s = time_to_first_token(cluster, tokens(f"new beside {seed}", TOTAL))
    return {"turn_ms": turn_s * 1000, "fresh_ms": fresh_s * 1000, "blocks_pulled": pulled}


def time_to_first_token(cluster: LocalCluster, prompt: list[int]) -> float:
    body = {"prompt": prompt, "max_tokens": 2, "stream": True, "ignore_eos": True}
    elapsed, began = 0.0, time.perf_counter()
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=300) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {") and not elapsed:
                elapsed = time.perf_counter() - began
    return elapsed


def replace_prefill_worker(cluster: LocalCluster) -> None:
    """Another one, with an empty cache, on the core of the one that leaves."""
    cluster.workers.pop("prefill-0").stop()
    wait_for(lambda: "prefill-0" not in cluster.records(), deadline_s=30, what="its end")
    cluster.start_worker("prefill-1", "prefill", "--cores", "0")
    cluster.wait_ready()
    time_to_first_token(cluster, tokens("joining", 600))  # joins the pair


def blocks_pulled(cluster: LocalCluster) -> float:
    """Returns the number of blocks that prefill workers pulled, from any worker."""
    sources = [w for w in cluster.records() if w.startswith("prefill")]
    return sum(metric(cluster, worker_id, PULLED) for worker_id in sources)


def summary(samples: list[dict[str, float]]) -> dict[str, Any]:
    return {
        "turn_ms": round(statistics.median(s["turn_ms"] for s in samples), 1),
        "fresh_ms": round(statistics.median(s["fresh_ms"] for s in samples), 1),
        "ratio": round(statistics.median(s["fresh_ms"] / s["turn_ms"] for s in samples), 2),
        "blocks_pulled": statistics.median(s["blocks_pulled"] for s in samples),
        "samples": samples,
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    print("| prefill worker | follow-up | second turn, TTFT | all computed | shorter by | blocks |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['prefill_worker']} | {row['follow_up']:,} | {row['turn_ms']:,.0f} ms "
            f"| {row['fresh_ms']:,.0f} ms | {row['ratio']:.1f} times | {row['blocks_pulled']:.0f} |"
        )


if __name__ == "__main__":
    main()

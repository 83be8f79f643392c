"""The second turn of a chat: its prefix is pulled from the decode worker, not computed again.

    python benchmarks/chat_turns.py [--repeats 5]

A chat's first turn (2,600 tokens of prompt, 400 made by decode) and a long follow-up (1,000
tokens), so 4,000 tokens in the second turn. Time to its first token, each beside a prompt of 4,000
tokens that nobody has seen:

    same      the prefill worker of the first turn: it has the prompt, and pulls what decode made
    another   a prefill worker that was started after the first turn: it pulls the whole prefix

One core for each of the two workers at work. Writes benchmarks/results/chat_turns.json and prints
the table of docs/measurements.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent))

from services.cluster.embedded_redis import EmbeddedRedis
from tests.harness.client import metric
from tests.harness.cluster import LocalCluster, wait_for

RESULTS = Path(__file__).parent / "results" / "chat_turns.json"
PROMPT, MADE, FOLLOW_UP = 2600, 400, 1000
PULLED = "tandem_prefix_blocks_pulled_total"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
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
        time_to_first_token(cluster, tokens(0, 600))
        chats = [first_turn(cluster, number) for number in range(1, 2 * repeats + 1)]
        same = [second_turn(cluster, chat, number) for number, chat in enumerate(chats[:repeats])]
        replace_prefill_worker(cluster)
        another = [
            second_turn(cluster, chat, number) for number, chat in enumerate(chats[repeats:], 100)
        ]
    result = {
        "tokens": {"prompt": PROMPT, "made": MADE, "follow_up": FOLLOW_UP},
        "same": summary(same),
        "another": summary(another),
        "load_average": os.getloadavg(),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print_table(result)


def tokens(seed: int, count: int) -> list[int]:
    return [(position * 31 + seed * 7919) % 40_000 + 100 for position in range(count)]


def first_turn(cluster: LocalCluster, number: int) -> list[int]:
    """The chat after its first turn: prompt and answer."""
    prompt = tokens(number, PROMPT)
    body = {"prompt": prompt, "max_tokens": MADE, "ignore_eos": True, "return_token_ids": True}
    response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=300)
    response.raise_for_status()
    return prompt + response.json()["choices"][0]["token_ids"]


def second_turn(cluster: LocalCluster, chat: list[int], number: int) -> dict[str, float]:
    """Of the chat's follow-up, and of as long a prompt that is new to all."""
    before = blocks_pulled(cluster)
    turn_s = time_to_first_token(cluster, chat + tokens(5000 + number, FOLLOW_UP))
    pulled = blocks_pulled(cluster) - before
    fresh_s = time_to_first_token(cluster, tokens(9000 + number, PROMPT + MADE + FOLLOW_UP))
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
    time_to_first_token(cluster, tokens(1, 601)[1:])  # joins the pair


def blocks_pulled(cluster: LocalCluster) -> float:
    """By prefill workers, from whoever had them."""
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


def print_table(result: dict[str, Any]) -> None:
    print("| prefill worker | second turn, TTFT | all computed | shorter by | blocks pulled |")
    print("|---|---|---|---|---|")
    for kind in ("same", "another"):
        row = result[kind]
        print(
            f"| {kind} | {row['turn_ms']:,.0f} ms | {row['fresh_ms']:,.0f} ms "
            f"| {row['ratio']:.1f} times | {row['blocks_pulled']:.0f} |"
        )


if __name__ == "__main__":
    main()

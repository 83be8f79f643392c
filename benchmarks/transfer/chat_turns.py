"""The second turn of a chat: its prefix is pulled from the decode worker, not computed again.

    python -m benchmarks.transfer.chat_turns [--repeats 5] [--follow-ups 1000,800]

A chat's first turn (a prompt and 400 tokens made by decode) and a long follow-up, in all 4,000
tokens in the second turn. Time to its first token, each beside a prompt of 4,000 tokens that nobody
has seen:

    same      the prefill worker of the first turn: it has the prompt, and pulls what decode made
    another   a prefill worker that was started after the first turn: it pulls the whole prefix

One core for each of the two workers at work. Writes benchmarks/results/chat_turns.json and prints
the table of docs/measurements.md.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import httpx

from benchmarks.shared.cluster import Cluster, up
from benchmarks.shared.requests import random_prompt, send_alone
from tandem_bench.framework import (
    RESULTS,
    Report,
    medians,
    numbers,
    options,
    ratios,
    run_main,
    table,
)

TOTAL, MADE = 4000, 400  # tokens of the second turn; those of the first one's answer
KINDS = ("same", "another")
PULLED = "tandem_prefix_blocks_pulled_total"


@options
class Options:
    repeats: int = 5
    follow_ups: str = "1000,800"
    """Tokens of the second question."""
    output: Path = RESULTS / "chat_turns.json"


def main(options: Options = Options()) -> None:
    report, follow_ups = Report(options.output), numbers(options.follow_ups)
    # Every chat stays in the decode worker's pool until its second turn.
    with up("--prefill-at", "remote", "--kv-memory", str(4 << 30)) as cluster:
        send_alone(cluster.url, tokens("warm-up", 600), 2)
        chats = {
            (kind, follow_up): [
                first_turn(cluster, f"{kind} {follow_up} {number}", TOTAL - MADE - follow_up)
                for number in range(options.repeats)
            ]
            for kind in KINDS
            for follow_up in follow_ups
        }
        rows = []
        for kind in KINDS:
            if kind == "another":
                cluster.scale(prefill=0)
                cluster.scale(prefill=1)
                send_alone(cluster.url, tokens("joining", 600), 2)  # joins the pair
            for follow_up in follow_ups:
                turns = [second_turn(cluster, c, follow_up) for c in chats[kind, follow_up]]
                rows.append({"prefill_worker": kind, "follow_up": follow_up, **summary(turns)})
    report.write(tokens={"total": TOTAL, "made": MADE}, rows=rows)
    print(
        table(
            "prefill worker | follow-up | second turn, TTFT | all computed | shorter by | blocks",
            (
                (
                    row["prefill_worker"],
                    f"{row['follow_up']:,}",
                    f"{row['turn_ms']:,.0f} ms",
                    f"{row['fresh_ms']:,.0f} ms",
                    f"{row['ratio']:.1f} times",
                    f"{row['blocks_pulled']:.0f}",
                )
                for row in rows
            ),
        )
    )


def tokens(seed: str, count: int) -> list[int]:
    return random_prompt(random.Random(seed), count)


def first_turn(cluster: Cluster, seed: str, length: int) -> list[int]:
    """Returns the chat after its first turn: prompt and answer."""
    prompt = tokens(seed, length)
    body = {"prompt": prompt, "max_tokens": MADE, "ignore_eos": True, "return_token_ids": True}
    response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=300)
    response.raise_for_status()
    return prompt + response.json()["choices"][0]["token_ids"]


def second_turn(cluster: Cluster, chat: list[int], follow_up: int) -> dict[str, float]:
    """Measures the chat's follow-up, and a prompt of the same length that is new to all workers."""
    seed = str(hash(tuple(chat)))
    before = cluster.metric(PULLED, "prefill")
    turn = send_alone(cluster.url, chat + tokens(seed, follow_up), 2)
    pulled = cluster.metric(PULLED, "prefill") - before
    fresh = send_alone(cluster.url, tokens(f"new beside {seed}", TOTAL), 2)
    times = {"turn_ms": 1000 * turn.ttft_s, "fresh_ms": 1000 * fresh.ttft_s}
    return {**times, "blocks_pulled": pulled}


def summary(samples: list[dict[str, float]]) -> dict[str, Any]:
    shorter = ratios((s["fresh_ms"] for s in samples), (s["turn_ms"] for s in samples))
    return {**medians(samples, 1), "ratio": round(shorter.median, 2), "samples": samples}


if __name__ == "__main__":
    run_main(main)

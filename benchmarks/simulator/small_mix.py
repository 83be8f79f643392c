"""A small mix of requests for SmolLM2, and a client that sends it at its times.

Prompts of 100 to 600 tokens, half of them with one of four prefixes of 256 tokens; 8 to 40 tokens
to make. Blocks are numbered, so the simulator takes the same requests; here each number becomes 16
tokens, other ones in each run, so that nothing is cached from the run before.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import httpx

from benchmarks.shared import requests
from benchmarks.shared.cluster import Cluster
from tandem.ops.simulator.traces import Arrival

BLOCK = 16
DEADLINE_S = 3600.0


def make_mix(count: int, seed: int) -> list[Arrival]:
    """Poisson arrivals, one a second; blocks are numbered, the last one partly filled."""
    rng = Random(f"mix {seed}")
    arrivals, at_s, next_block = [], 0.0, 1000
    for _ in range(count):
        at_s += rng.expovariate(1.0)
        num_tokens = rng.randrange(100, 600)
        blocks = -(-num_tokens // BLOCK)
        shared = 256 // BLOCK if rng.random() < 0.5 else 0
        first = 100 * rng.randrange(4)
        head = range(first, first + min(shared, blocks - 1))
        ids = (*head, *range(next_block, next_block + blocks - len(head)))
        next_block += blocks
        arrivals.append(Arrival(at_s, num_tokens, rng.randrange(8, 41), ids))
    return arrivals


def tokens_of(arrival: Arrival, run: str) -> list[int]:
    """The prompt itself: equal blocks, equal tokens, within one run."""
    tokens: list[int] = []
    for block_id in arrival.block_ids:
        rng = Random(f"{run} {block_id}")
        tokens += requests.random_prompt(rng, BLOCK)
    return tokens[: arrival.num_tokens]


def ask_of(arrival: Arrival, run: str) -> requests.Ask:
    return requests.Ask(tokens_of(arrival, run), arrival.output_tokens, arrival.at_s)


async def send(client: httpx.AsyncClient, arrival: Arrival, run: str) -> requests.Seen:
    return await requests.send(client, ask_of(arrival, run))


async def replay(cluster: Cluster, arrivals: Sequence[Arrival], run: str) -> list[requests.Seen]:
    """Each at its time, whether those before it are done or not."""
    async with requests.client_of(cluster.url) as client:
        asks = [ask_of(arrival, run) for arrival in arrivals]
        seen = await requests.open_loop(client, asks, DEADLINE_S)
    assert None not in seen, f"some took longer than {DEADLINE_S} s"
    return [each for each in seen if each]

"""A small mix of requests for SmolLM2, and a client that sends it at its times.

Prompts of 100 to 600 tokens, half of them with one of four prefixes of 256 tokens; 8 to 40 tokens
to make. Blocks are numbered, so the simulator takes the same requests; here each number becomes 16
tokens, other ones in each run, so that nothing is cached from the run before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import httpx

from services.simulator.traces import Arrival
from tests.harness.client import open_client, stream_completion
from tests.harness.cluster import LocalCluster

BLOCK = 16


@dataclass(frozen=True)
class Seen:
    ttft_s: float
    tpot_s: float


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
        tokens += [rng.randrange(100, 40_000) for _ in range(BLOCK)]
    return tokens[: arrival.num_tokens]


async def send(client: httpx.AsyncClient, arrival: Arrival, run: str) -> Seen:
    began, first, last, count = time.perf_counter(), 0.0, 0.0, 0
    prompt = tokens_of(arrival, run)
    async for event in stream_completion(client, prompt, max_tokens=arrival.output_tokens):
        got = sum(len(choice.get("token_ids") or ()) for choice in event.get("choices", ()))
        if got:
            last = time.perf_counter()
            first = first or last
            count += got
    assert count == arrival.output_tokens, f"{count} tokens of {arrival.output_tokens}"
    return Seen(first - began, (last - first) / max(1, count - 1))


async def replay(cluster: LocalCluster, arrivals: Sequence[Arrival], run: str) -> list[Seen]:
    """Each at its time, whether those before it are done or not."""
    began = time.perf_counter()

    async def one(client: httpx.AsyncClient, arrival: Arrival) -> Seen:
        await asyncio.sleep(max(0.0, arrival.at_s - (time.perf_counter() - began)))
        return await send(client, arrival, run)

    async with open_client(cluster) as client:
        return list(await asyncio.gather(*(one(client, a) for a in arrivals)))

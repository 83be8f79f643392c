"""Requests over HTTP at their times, and when each of their tokens came to the client.

For Tandem and for vLLM alike: both take prompts of token ids at /v1/completions and stream token
ids back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import httpx

from tests.harness.client import stream_completion, tokens_of


@dataclass(frozen=True, slots=True)
class Ask:
    prompt: list[int]
    max_tokens: int
    at_s: float = 0.0  # of an open loop: when it is sent


@dataclass(frozen=True, slots=True)
class Seen:
    """Seconds from sending to each token."""

    token_s: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        return self.token_s[0]

    @property
    def tpot_s(self) -> float:
        return (self.token_s[-1] - self.token_s[0]) / max(1, len(self.token_s) - 1)

    def itl_s(self, share: float) -> float:
        """Returns the time between two tokens that this share of the gaps does not exceed."""
        gaps = [after - before for before, after in pairwise(self.token_s)]
        return percentile(gaps, share) if gaps else 0.0


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share is not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def random_prompt(rng: Random, length: int) -> list[int]:
    """Returns a prompt that is in no server's cache."""
    return [rng.randrange(100, 40_000) for _ in range(length)]


def client_of(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=512)
    return httpx.AsyncClient(base_url=url, timeout=600, limits=limits)


async def send(client: httpx.AsyncClient, ask: Ask) -> Seen:
    """Streams one completion. Raises on any other answer, and on fewer tokens than wanted."""
    token_s: list[float] = []
    began = time.perf_counter()
    async for event in stream_completion(client, ask.prompt, max_tokens=ask.max_tokens):
        token_s += [time.perf_counter() - began] * len(tokens_of([event]))
    if len(token_s) != ask.max_tokens:
        raise RuntimeError(f"{len(token_s)} tokens of {ask.max_tokens}")
    return Seen(tuple(token_s))


async def closed_loop(client: httpx.AsyncClient, asks: Sequence[Ask], at_once: int) -> list[Seen]:
    """Sends `at_once` requests at a time, and the next one when one ends."""
    queue: Iterator[Ask] = iter(asks)
    seen: list[Seen] = []

    async def one() -> None:
        for ask in queue:
            seen.append(await send(client, ask))

    await asyncio.gather(*(one() for _ in range(at_once)))
    return seen


async def open_loop(
    client: httpx.AsyncClient, asks: Sequence[Ask], ends_s: float
) -> list[Seen | None]:
    """Each is sent at its time, whether those before it are done or not. None: not whole when all
    ends."""
    began = time.perf_counter()

    async def one(ask: Ask) -> Seen | None:
        await asyncio.sleep(max(0.0, ask.at_s - (time.perf_counter() - began)))
        try:
            async with asyncio.timeout(max(0.0, began + ends_s - time.perf_counter())):
                return await send(client, ask)
        except TimeoutError:
            return None

    return list(await asyncio.gather(*(one(ask) for ask in asks)))

"""Requests over HTTP at their times, and when each of their tokens came to the client.

They work for Tandem and for vLLM: both take prompts of token ids at /v1/completions and stream
token ids back.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import httpx

from tandem_bench.framework import quantile


@dataclass(frozen=True, slots=True)
class Ask:
    prompt: list[int]
    max_tokens: int
    at_s: float = 0.0  # when an open loop sends it


@dataclass(frozen=True, slots=True)
class Seen:
    """Seconds from sending to each token."""

    token_s: tuple[float, ...]
    text: str = ""
    num_cached: int = 0  # tokens of the prompt

    @property
    def ttft_s(self) -> float:
        return self.token_s[0]

    @property
    def tpot_s(self) -> float:
        return (self.token_s[-1] - self.token_s[0]) / max(1, len(self.token_s) - 1)

    def itl_s(self, share: float) -> float:
        """Returns the time between two tokens that this share of the gaps does not exceed."""
        return quantile([after - before for before, after in pairwise(self.token_s)], share)


def random_prompt(rng: Random, length: int) -> list[int]:
    """Returns a prompt that is in no server's cache."""
    return [rng.randrange(100, 40_000) for _ in range(length)]


def client_of(url: str, **more: object) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=2048, max_keepalive_connections=2048)
    return httpx.AsyncClient(base_url=url, timeout=600, limits=limits, **more)


async def send(client: httpx.AsyncClient, ask: Ask) -> Seen:
    """Streams one greedy completion. Raises RuntimeError for an error or for missing tokens."""
    body = {
        "prompt": ask.prompt,
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    token_s: list[float] = []
    text, num_cached = "", 0
    began = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            now_s = time.perf_counter() - began
            for choice in event.get("choices", ()):
                token_s += [now_s] * len(choice.get("token_ids") or ())
                text += choice["text"]
            details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
            num_cached = details.get("cached_tokens") or num_cached
    if len(token_s) != ask.max_tokens:
        raise RuntimeError(f"{len(token_s)} tokens of {ask.max_tokens}")
    return Seen(tuple(token_s), text, num_cached)


def send_alone(url: str, prompt: list[int], max_tokens: int, *, key: str = "") -> Seen:
    """Sends one request on a new connection, for programs without an event loop."""

    async def one() -> Seen:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with client_of(url, headers=headers) as client:
            return await send(client, Ask(prompt, max_tokens))

    return asyncio.run(one())


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
    """Sends each request at its time, whether those before it are done or not. Returns None for
    one that has not ended after `ends_s`."""
    began = time.perf_counter()

    async def one(ask: Ask) -> Seen | None:
        await asyncio.sleep(max(0.0, ask.at_s - (time.perf_counter() - began)))
        try:
            async with asyncio.timeout(max(0.0, began + ends_s - time.perf_counter())):
                return await send(client, ask)
        except TimeoutError:
            return None

    return list(await asyncio.gather(*(one(ask) for ask in asks)))

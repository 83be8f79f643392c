"""Clients that send requests continuously while a test changes the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

from tests.chaos.load import MAX_TOKENS, Load, Prompt, Request, answered, golden_prompts
from tests.harness.cluster import Served
from tests.harness.kv_form import KvForm


@dataclass
class Asking:
    """Running clients, each of which sends its next request when the last one has ended."""

    load: Load
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def more(self, count: int) -> None:
        """Waits until `count` more requests have ended."""
        wanted = len(self.load.outcomes) + count
        async with asyncio.timeout(120):
            while len(self.load.outcomes) < wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    def check(self) -> int:
        """Checks that every request ended correctly with its exact tokens. Returns their number."""
        for outcome in self.load.outcomes:
            request = outcome.request
            assert outcome.kind == "finished", f"{outcome.kind} after {outcome.seconds:.1f} s"
            assert outcome.token_ids == request.prompt.expected[: request.max_tokens]
        return len(self.load.outcomes)


def _endless(rng: Random, prompts: list[Prompt], stop: asyncio.Event) -> Iterator[Request]:
    number = 0
    while not stop.is_set():
        number += 1
        api = "http" if number % 2 else "grpc"
        yield Request(number, rng.choice(prompts), rng.randint(2, MAX_TOKENS), api, None)  # type: ignore[arg-type]


@asynccontextmanager
async def asking(
    cluster: Served, num_clients: int, form: KvForm = KvForm()
) -> AsyncIterator[Asking]:
    """Sends requests while the block runs. All of them have ended when the context exits."""
    rng = Random(7)
    stop = asyncio.Event()
    prompts = [p for _ in range(4) for p in golden_prompts(rng, (1, 3, 5))]
    prompts = await answered(cluster, prompts, form)
    wanted = _endless(rng, prompts, stop)
    load = Load(cluster, wanted, num_clients=num_clients, bound_s=120)
    running = asyncio.create_task(load.run())
    now = Asking(load, stop)
    try:
        await now.more(num_clients)
        yield now
    finally:
        stop.set()
        await running

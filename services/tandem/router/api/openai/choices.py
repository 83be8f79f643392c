"""The choices of one answer: each is one generation, and their deltas are passed on as they come.

    all prepared --> begun together --> each ends by itself --> all ended
         `----------------`------------------`--> one fails, or the client goes: the others are
                                                  cancelled, and only then the iterator ends

Today an answer has a choice for each prompt of its request.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import NamedTuple

from tandem.errors import BadRequest
from tandem.router.request.allowed import name_prompt
from tandem.router.request.delta import Delta
from tandem.router.request.generator import Generator
from tandem.router.request.request import ClientRequest


class ChoiceDelta(NamedTuple):
    choice: int
    delta: Delta


def generate_choices(
    generator: Generator, requests: Sequence[ClientRequest], trace: Mapping[str, str]
) -> AsyncGenerator[ChoiceDelta, None]:
    """Generates one choice per request, in order. None is placed before all have been checked."""
    together = asyncio.Barrier(len(requests))
    return interleave([generator.generate(r, trace, together) for r in requests])


async def interleave(
    choices: Sequence[AsyncGenerator[Delta, None]],
) -> AsyncGenerator[ChoiceDelta, None]:
    """Yields deltas of all choices; closing it closes them. Raises the first error of any."""
    if len(choices) == 1:
        async with aclosing(choices[0]) as deltas:
            async for delta in deltas:
                yield ChoiceDelta(0, delta)
        return
    # Bounded: a client that reads slowly stops the choices, as it stops a single one.
    arrived: asyncio.Queue[ChoiceDelta | Exception | None] = asyncio.Queue(len(choices))
    tasks = [asyncio.create_task(_follow(i, c, arrived)) for i, c in enumerate(choices)]
    num_running = len(tasks)
    try:
        while num_running:
            item = await arrived.get()
            if item is None:
                num_running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _follow(
    index: int,
    deltas: AsyncGenerator[Delta, None],
    arrived: asyncio.Queue[ChoiceDelta | Exception | None],
) -> None:
    """Puts a choice's deltas, and then None or its error."""
    end: Exception | None = None
    async with aclosing(deltas):
        try:
            async for delta in deltas:
                await arrived.put(ChoiceDelta(index, delta))
        except BadRequest as error:
            end = name_prompt(error, index)
        except Exception as error:
            end = error
    await arrived.put(end)

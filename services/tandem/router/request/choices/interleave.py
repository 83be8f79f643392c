"""Merges several asynchronous iterators; items are passed on as they arrive."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _End:
    error: Exception | None


async def interleave(
    parts: Sequence[AsyncGenerator[_T, None]],
) -> AsyncGenerator[tuple[int, _T], None]:
    """Yields (index of the iterator, item) for each item, until all iterators have ended.

    Raises the first error of any iterator. Closing this generator closes all iterators.
    """
    if len(parts) == 1:
        async with aclosing(parts[0]) as items:
            async for item in items:
                yield 0, item
        return
    # The queue holds only one item per iterator, so that the iterators wait for a slow client.
    arrived: asyncio.Queue[tuple[int, _T] | _End] = asyncio.Queue(len(parts))
    tasks = [asyncio.create_task(_pass_on(i, part, arrived)) for i, part in enumerate(parts)]
    num_running = len(tasks)
    try:
        while num_running:
            came = await arrived.get()
            if not isinstance(came, _End):
                yield came
            elif came.error is not None:
                raise came.error
            else:
                num_running -= 1
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def items_of(
    interleaved: AsyncGenerator[tuple[int, _T], None],
) -> AsyncGenerator[_T, None]:
    """Yields the items of `interleave` without the indices of their iterators."""
    async with aclosing(interleaved):
        async for _, item in interleaved:
            yield item


async def _pass_on(
    index: int, part: AsyncGenerator[_T, None], arrived: asyncio.Queue[tuple[int, _T] | _End]
) -> None:
    error: Exception | None = None
    async with aclosing(part):
        try:
            async for item in part:
                await arrived.put((index, item))
        except Exception as raised:
            error = raised
    await arrived.put(_End(error))

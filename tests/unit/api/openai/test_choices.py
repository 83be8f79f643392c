from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from tandem.api.openai.choices import named
from tandem.errors import ContextTooLong, QueueFull, TandemError
from tandem.router.request.choices.interleave import interleave
from tandem.router.request.delta import Delta, Usage


class Scripted:
    """A generation that says these texts, and then ends, raises or waits; `closed` at its end."""

    def __init__(self, *texts: str, end: TandemError | asyncio.Event | None = None) -> None:
        self.texts = texts
        self.end = end
        self.closed = False
        self.num_said = 0

    async def __call__(self) -> AsyncGenerator[Delta, None]:
        try:
            for text in self.texts:
                self.num_said += 1
                yield Delta(text, [], Usage(0, 0, 0))
            if isinstance(self.end, asyncio.Event):
                await self.end.wait()
            elif self.end is not None:
                raise self.end
        finally:
            self.closed = True


async def heard(*scripts: Scripted) -> list[tuple[int, str]]:
    return [(c, delta.text) async for c, delta in interleave([s() for s in scripts])]


async def test_all_is_said_in_the_order_of_each_choice() -> None:
    got = await heard(Scripted("a", "b"), Scripted(), Scripted("c"))
    assert sorted(got) == [(0, "a"), (0, "b"), (2, "c")]
    assert await heard(Scripted("a", "b")) == [(0, "a"), (0, "b")]


async def test_the_first_error_ends_all_choices() -> None:
    waiting = Scripted("a", end=asyncio.Event())
    with pytest.raises(QueueFull):
        await heard(waiting, Scripted(end=QueueFull("full")), Scripted("b", end=asyncio.Event()))
    assert waiting.closed


async def test_a_refusal_says_which_prompt_it_is_about() -> None:
    bad = Scripted(end=ContextTooLong("the prompt is long", param="prompt"))
    with pytest.raises(ContextTooLong) as raised:
        async for _ in named(1, bad()):
            pass
    assert raised.value.message == "prompt 1 (from 0): the prompt is long"
    assert raised.value.param == "prompt"
    assert bad.closed


async def test_closing_it_closes_all_choices() -> None:
    scripts = [Scripted("a", end=asyncio.Event()), Scripted(end=asyncio.Event())]
    choices = interleave([s() for s in scripts])
    assert (await anext(choices))[1].text == "a"
    await choices.aclose()
    assert all(s.closed for s in scripts)


async def test_a_slow_reader_stops_the_choices() -> None:
    scripts = [Scripted(*"abcdefghij"), Scripted(*"abcdefghij")]
    choices = interleave([s() for s in scripts])
    await anext(choices)
    for _ in range(100):  # turns of the loop: enough for both to say all
        await asyncio.sleep(0)
    assert sum(s.num_said for s in scripts) < 8
    await choices.aclose()

"""The choices of one answer: their deltas are passed on as they come.

    all prepared --> begun together --> each ends by itself --> all ended
         `----------------`------------------`--> one fails, or the client goes: the others are
                                                  cancelled, and only then the iterator ends

An answer has `n` choices for each prompt of its request; those of a prompt follow each other.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import NamedTuple

from tandem.errors import BadRequest
from tandem.router.request.allowed import name_prompt
from tandem.router.request.choices.interleave import interleave
from tandem.router.request.delta import Delta
from tandem.router.request.generator import Generator
from tandem.router.request.request import ClientRequest


class ChoiceDelta(NamedTuple):
    choice: int
    delta: Delta


async def generate_choices(
    generator: Generator,
    requests: Sequence[ClientRequest],
    trace: Mapping[str, str],
    num_before: int = 0,
) -> AsyncGenerator[ChoiceDelta, None]:
    """Generates for all prompts of a body, or for some of them after `num_before` others. None is
    placed before all of these have been checked."""
    together = generator.together(len(requests))
    prompts = [generator.generate(r, trace, together) for r in requests]
    if num_before + len(prompts) > 1:
        prompts = [named(index, deltas) for index, deltas in enumerate(prompts, num_before)]
    async with aclosing(interleave(prompts)) as deltas:
        async for prompt, delta in deltas:
            yield ChoiceDelta(prompt * requests[0].sampling.n + delta.index, delta)


async def named(index: int, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
    """Yields a prompt's deltas. A refusal of the prompt says which of several it is."""
    async with aclosing(deltas):
        try:
            async for delta in deltas:
                yield delta
        except BadRequest as error:
            raise name_prompt(error, index) from None

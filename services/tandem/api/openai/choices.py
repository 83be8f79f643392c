"""Generates all choices of a request and merges their deltas as they arrive.

A request may have several prompts, and each prompt has `n` choices. With n=2, prompt 0 has the
choices 0 and 1, and prompt 1 has the choices 2 and 3. All prompts are validated before the first
one starts. If one generation fails or the client disconnects, the other generations are cancelled.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import NamedTuple

from tandem.errors import BadRequest
from tandem.router.request.allowed import name_prompt
from tandem.router.request.choices.interleave import interleave
from tandem.router.request.delta import Delta
from tandem.router.request.generator import BodyRequests, Generator
from tandem.router.request.request import ClientRequest


class ChoiceDelta(NamedTuple):
    choice: int
    delta: Delta


async def generate_choices(
    generator: Generator,
    requests: Sequence[ClientRequest],
    trace: Mapping[str, str],
    num_before: int = 0,
    together: BodyRequests | None = None,
) -> AsyncGenerator[ChoiceDelta, None]:
    """Yields the deltas of all choices as they arrive. `requests` has one entry for each prompt.

    `together` is the state that the requests share; None: a new one. `num_before` is used by
    callers that split the prompts of a body into several calls: it is the number of prompts in
    earlier calls, so that errors name the right prompt.
    """
    together = together or generator.together(len(requests))
    prompts = [generator.generate(r, trace, together) for r in requests]
    if num_before + len(prompts) > 1:
        prompts = [named(index, deltas) for index, deltas in enumerate(prompts, num_before)]
    async with aclosing(interleave(prompts)) as deltas:
        async for prompt, delta in deltas:
            yield ChoiceDelta(prompt * requests[0].sampling.n + delta.index, delta)


async def named(index: int, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
    """Yields a prompt's deltas unchanged. If a BadRequest is raised, its message gets the prompt's
    index."""
    async with aclosing(deltas):
        try:
            async for delta in deltas:
                yield delta
        except BadRequest as error:
            raise name_prompt(error, index) from None

"""The protocol of an engine under test: a process that prefills or decodes when a line asks it to.

A line of standard input is `prefill TOKENS` or `decode BATCH CONTEXT STEPS`; the answer is a line
`seconds S`. To a line `complete COUNT TOKEN...`, the answer is `completed S STEPS TOKEN...`: COUNT
tokens after the first one, and the seconds and steps that they took. The first line that it prints
itself is `ready DESCRIPTION`. Everything else it prints goes to standard error, so the engines' own
messages cannot be taken for answers. Nothing of Tandem is imported here: the engines run in
environments of their own.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable

Prefill = Callable[[list[int]], float]
Decode = Callable[[list[list[int]], int], float]
Complete = Callable[[list[int], int], tuple[float, int, list[int]]]


def redirect() -> int:
    """Sends an engine's prints to standard error; call it before the import. Returns the descriptor
    for answers."""
    answers = os.dup(1)
    os.dup2(2, 1)
    return answers


def serve(
    answers: int,
    description: str,
    prefill: Prefill,
    decode: Decode,
    complete: Complete | None = None,
) -> None:
    """`prefill(prompt)` answers the seconds to its first token; `decode(prompts, steps)` those of
    `steps` steps of all sequences together, after their first tokens. `complete(prompt, count)`
    returns the seconds and steps of `count` tokens after the first one, and these tokens."""
    rng = random.Random(1)

    def prompt(length: int) -> list[int]:  # never the same: no engine finds it in its cache
        return [rng.randrange(100, 40_000) for _ in range(length)]

    def answer(text: str) -> None:
        os.write(answers, f"{text}\n".encode())

    answer(f"ready {description}")
    for line in sys.stdin:
        match line.split():
            case ["prefill", tokens]:
                answer(f"seconds {prefill(prompt(int(tokens)))}")
            case ["decode", batch, context, steps]:
                prompts = [prompt(int(context)) for _ in range(int(batch))]
                answer(f"seconds {decode(prompts, int(steps))}")
            case ["complete", count, *token_ids] if complete is not None:
                seconds, steps, made = complete(list(map(int, token_ids)), int(count))
                answer(f"completed {seconds} {steps} {' '.join(map(str, made))}")
            case _:
                raise SystemExit(f"no such line: {line!r}")

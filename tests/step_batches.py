"""Batches for a ModelRunner: prompts in blocks, complete, in chunks, or several at once."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tandem.engine.executor.runner import ModelRunner
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch


@dataclass(slots=True)
class Progress:
    """A sequence in a runner's pool, computed up to `done`."""

    token_ids: Sequence[int]
    block_table: list[int]
    done: int = 0
    other_tables: Sequence[list[int]] = ()  # block tables of the other KV groups

    def take(self, num_tokens: int) -> SequenceSlice:
        """Takes the next `num_tokens` tokens, or the remaining ones if there are fewer."""
        first = self.done
        self.done = min(self.done + num_tokens, len(self.token_ids))
        return SequenceSlice(
            list(self.token_ids[first : self.done]),
            self.done,
            self.block_table,
            True,
            other_tables=self.other_tables,
        )


def place(runner: ModelRunner, prompts: Sequence[Sequence[int]], seed: int = 0) -> list[Progress]:
    """Allocates a pool and distributes the prompts' blocks over it at random."""
    layout = runner.layout()
    counts = [layout.blocks_of(len(prompt)) for prompt in prompts]
    num_blocks = sum(counts) + 3
    runner.allocate(*[num_blocks] * len(layout.groups))
    tables: list[list[list[int]]] = []
    for group in range(len(layout.groups)):
        free = list(range(num_blocks))
        random.Random(seed + group).shuffle(free)
        tables.append([[free.pop() for _ in range(count)] for count in counts])
    return [
        Progress(prompt, own[0], other_tables=own[1:])
        for prompt, own in zip(prompts, zip(*tables, strict=True), strict=True)
    ]


def logits_after(runner: ModelRunner, prompt: Sequence[int]) -> torch.Tensor:
    """Computes the logits [vocab] after the prompt, in one step and alone."""
    (sequence,) = place(runner, [prompt])
    return runner.forward(StepBatch([sequence.take(len(prompt))]))[0].clone()


def mixed_steps(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], chunks: Sequence[int], seed: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Computes all prompts in random chunks and steps. Yields (prompt, tokens done, logits
    [vocab])."""
    choose = random.Random(seed)
    sequences = place(runner, prompts, seed)
    unfinished = list(range(len(prompts)))
    while unfinished:
        chosen = choose.sample(unfinished, choose.randint(1, len(unfinished)))
        slices = [sequences[i].take(choose.choice(chunks)) for i in chosen]
        for i, logits in zip(chosen, runner.forward(StepBatch(slices)).clone(), strict=True):
            yield i, sequences[i].done, logits
        unfinished = [i for i, s in enumerate(sequences) if s.done < len(s.token_ids)]

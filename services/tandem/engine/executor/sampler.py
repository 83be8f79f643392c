"""Turns logits into tokens: each sequence's own parameters, drawn by (seed, position).

The draw for the token at index i of a whole sequence depends on its seed and on i alone, so a
sequence that was moved, preempted or prefilled elsewhere goes on as it would have.
"""

from collections.abc import Callable
from collections.abc import Sequence as Many

import torch

from tandem.engine.sequence import Sequence
from tandem_kernels.sampling import Draw, sample

Sample = Callable[[torch.Tensor, Many[Draw]], list[int]]


def sample_next(
    logits: torch.Tensor, sequences: Many[Sequence], sample: Sample = sample
) -> list[int]:
    """The token that follows each sequence; logits are fp32 [len(sequences), vocab]."""
    return sample(logits, [_draw(sequence) for sequence in sequences])


def _draw(sequence: Sequence) -> Draw:
    sampling = sequence.sampling
    return Draw(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        position=sequence.num_tokens,
    )

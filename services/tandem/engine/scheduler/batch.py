"""The batch that the scheduler hands the model for one step: plain lists, no tensors.

A step computes, for each scheduled sequence, the next `num_tokens` tokens after those whose KV is
in the pool already. Prefill, a chunk of it and decode are the same thing: catch up.

    tokens of a sequence   [ computed before | this step's tokens ]
                             context_len - num_tokens    context_len
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tandem.engine.cache.heavy_hitters import Sums
    from tandem.kv_budget import VisibleKeys


class SequenceSlice(NamedTuple):
    """One sequence's part of a step. A tuple, because a step makes one for each sequence."""

    token_ids: list[int]  # this step's tokens, num_tokens of them
    context_len: int  # tokens in the KV pool after this step
    # Blocks of the first KV group's pool that cover at least context_len tokens, in order. Those
    # before the group's window may be any of the pool, and so may those that `visible` hides.
    block_table: list[int]
    wants_logits: bool  # whether the last token's logits are needed (not for inner chunks)
    all_logits: bool = False  # those of all its tokens are
    wants_hidden: bool = False  # the last token's hidden state is, too
    other_tables: Sequence[list[int]] = ()  # of the other groups' pools
    adapter: str = ""  # digest of the LoRA adapter that computes it
    visible: VisibleKeys | None = None  # in layers without a window of their own; None: all keys
    # Tokens before it whose KV the sequence gave up: no part of context_len, but of positions.
    num_passed: int = 0
    # Of each block of the context, the weights that its keys attracted: the step's are added.
    block_sums: Sums | None = None

    @property
    def block_tables(self) -> tuple[list[int], ...]:
        """The table of each group."""
        return (self.block_table, *self.other_tables)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_logits(self) -> int:
        """The number of its last tokens whose logits are needed."""
        return self.num_tokens if self.all_logits else int(self.wants_logits)


@dataclass(frozen=True, slots=True)
class StepBatch:
    slices: list[SequenceSlice]

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.slices)

    @property
    def has_adapters(self) -> bool:
        return any(s.adapter for s in self.slices)

"""The batch that the scheduler hands the model for one step: plain lists, no tensors.

A step computes, for each scheduled sequence, the next `num_tokens` tokens after those whose KV is
in the pool already. Prefill, a chunk of it and decode differ only in the number of tokens.

    tokens of a sequence   [ computed before | this step's tokens ]
                             context_len - num_tokens    context_len
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tandem.common.kv_budget import VisibleKeys
    from tandem.engine.cache.heavy_hitters import Sums


class SequenceSlice(NamedTuple):
    """One sequence's part of a step. A tuple, because a step makes one for each sequence."""

    token_ids: list[int]  # this step's tokens, num_tokens of them
    context_len: int  # tokens in the KV pool after this step
    # Blocks of the first KV group's pool that cover at least context_len tokens, in order. Entries
    # before the group's window, and those that `visible` hides, may name any block of the pool.
    block_table: list[int]
    wants_logits: bool  # whether the last token's logits are needed (not for inner chunks)
    all_logits: bool = False  # whether the logits of all its tokens are needed
    wants_hidden: bool = False  # whether the last token's hidden state is needed, too
    other_tables: Sequence[list[int]] = ()  # block tables of the other groups' pools
    adapter: str = ""  # digest of the sequence's LoRA adapter
    visible: VisibleKeys | None = None  # in layers without a window of their own; None: all keys
    # Tokens whose KV the sequence gave up. They count in positions, but not in context_len.
    num_passed: int = 0
    # Sum of the attention weights of each block's keys; the step adds its own.
    block_sums: Sums | None = None

    @property
    def block_tables(self) -> tuple[list[int], ...]:
        """The block table of each KV group."""
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

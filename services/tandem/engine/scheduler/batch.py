"""The batch of one step as the scheduler passes it to the model: plain lists, no tensors.

For each scheduled sequence, a step computes the `num_tokens` tokens after those whose KV is in the
pool. Prefill, a chunk of a prefill and decode differ only in the number of tokens.

    tokens of a sequence    [ computed before        | this step's tokens ]
    number up to this end   context_len - num_tokens   context_len
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tandem.common.kv_budget import VisibleKeys
    from tandem.engine.cache.heavy_hitters import Sums


class SequenceSlice(NamedTuple):
    """One sequence's part of a step. It is a tuple for speed: each step makes one for every
    sequence."""

    token_ids: list[int]  # ids of the tokens of this step, `num_tokens` in number
    context_len: int  # tokens in the KV pool after this step
    # Ids of blocks in the first KV group's pool that cover at least context_len tokens, in order.
    # Entries before the group's window, and those that `visible` hides, are ignored and may be any
    # block of the pool.
    block_table: list[int]
    # Whether the last token's logits are needed. Only the last chunk of a prompt needs them.
    wants_logits: bool
    all_logits: bool = False  # whether the logits of all tokens of the slice are needed
    wants_hidden: bool = False  # whether the last token's hidden state is also needed
    other_tables: Sequence[list[int]] = ()  # block tables of the other KV groups
    adapter: str = ""  # digest of the LoRA adapter; empty for the base model
    # The keys that each token sees in layers without a sliding window; None: all keys.
    visible: VisibleKeys | None = None
    # Number of evicted tokens. They count in positions, but not in context_len.
    num_evicted: int = 0
    # Attention sums of the blocks [blocks] fp32. The step adds its attention weights in place.
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
        """Number of the slice's last tokens whose logits are needed."""
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

"""The batch of one step as the scheduler passes it to the model: plain lists, no tensors.

For each scheduled sequence, a step computes the next `num_tokens` tokens, whose KV is not in the
pool yet. Prefill, a chunk of a prefill and decode differ only in this number. For example, if 100
tokens of a sequence are computed and the step computes 28, then `num_tokens` is 28 and
`context_len` is 128:

    tokens 0 to 99          computed in earlier steps
    tokens 100 to 127       computed in this step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from tandem.common.kv_budget import VisibleKeys
    from tandem.engine.cache.heavy_hitters import Sums


class SequenceSlice(NamedTuple):
    """The tokens of one sequence that a step computes. It is a tuple for speed, because each step
    makes one for every sequence."""

    # The `num_tokens` token ids that this step computes. In a batch that is launched ahead, -1 - i
    # stands for token i of the sampling that was started last.
    token_ids: list[int]
    context_len: int  # number of the sequence's tokens in the KV pool after this step
    # Ids of the sequence's blocks in the first KV group's pool, for at least `context_len` tokens.
    # The step ignores entries whose tokens are before the window or hidden by `visible`.
    block_table: list[int]
    # True: the last token's logits are needed. False for all chunks of a prompt but the last.
    wants_logits: bool
    all_logits: bool = False  # True: the logits of all tokens of the slice are needed
    wants_hidden: bool = False  # True: the last token's hidden state is needed
    other_tables: Sequence[list[int]] = ()  # block tables of the other KV groups
    adapter: str = ""  # digest of the LoRA adapter; empty for the base model
    # Which keys each token sees in layers without a sliding window. None: all keys.
    visible: VisibleKeys | None = None
    # Number of earlier tokens whose KV was evicted (heavy_hitters.py). For example, after 300
    # tokens of which 64 were evicted, `context_len` is 236, and the next token has position 300.
    num_evicted: int = 0
    # Sum of the attention weights that each block got in all steps, fp32 [blocks]. The step adds
    # its own weights in place. None unless the KV budget keeps heavy hitters.
    block_sums: Sums | None = None
    # Embeddings that take the place of those of some tokens: (index of the first token in
    # `token_ids`, fp32 [tokens, hidden] on the host) for each run of such tokens.
    given: Sequence[tuple[int, torch.Tensor]] = ()
    # Number of proposed tokens at the end of `token_ids`. The logits of each, and of the token
    # before the first, are needed.
    num_drafts: int = 0

    @property
    def block_tables(self) -> tuple[list[int], ...]:
        """The block table of each KV group."""
        return (self.block_table, *self.other_tables)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_logits(self) -> int:
        """Number of tokens at the end of the slice whose logits are needed."""
        return self.num_tokens if self.all_logits else self.wants_logits + self.num_drafts


@dataclass(frozen=True, slots=True)
class StepBatch:
    slices: list[SequenceSlice]
    # True: the batch is launched before the tokens of the step before are known, so some token ids
    # of its slices are negative.
    is_ahead: bool = False
    # Number of largest logits of each row that are read; the others may be -infinity. 0: all are.
    top_k: int = 0
    # For each state group: the slots of the sequences whose states were computed in earlier steps.
    # Only if they are not computed in place (working_states.py).
    live_slots: Sequence[frozenset[int]] = ()

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.slices)

    def with_tokens(self, drawn: Sequence[int]) -> StepBatch:
        """Returns the batch with the tokens of the last sampling in place of negative token ids.
        Token 0 replaces NO_TOKEN, whose sequence ends."""
        slices = [
            s._replace(token_ids=[t if t >= 0 else max(drawn[-1 - t], 0) for t in s.token_ids])
            for s in self.slices
        ]
        return StepBatch(slices, top_k=self.top_k, live_slots=self.live_slots)

    @property
    def has_adapters(self) -> bool:
        return any(s.adapter for s in self.slices)

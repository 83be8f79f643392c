"""The protocol of the model runner on which an engine runs its steps."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from tandem.engine.adapter_slots import AdapterRunner
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.scheduler.batch import StepBatch
from tandem_kernels.logprobs import Logprobs
from tandem_kernels.sampling import Draw


class Runner(AdapterRunner, Protocol):
    """Computes steps. It has a model and the tensor of the KV pools."""

    dtype_name: str
    numerics_name: str
    kv_dtype_name: str
    max_model_len: int
    vocab_size: int  # token ids are below this number
    tokens_per_step: int  # the default token budget of a step on this device
    why_no_budgets: str  # why sequences cannot have KV budgets; empty if they can

    kv: torch.Tensor  # all pools, one after the other; set by `allocate`

    def layout(self, *num_blocks: int) -> KvLayout:
        """Returns the layout of pools with these numbers of blocks, one number for each KV group.
        By default each pool has one block."""

    def allocate(self, *num_blocks: int) -> None:
        """Allocates pools with these numbers of blocks, one number for each KV group."""

    def copy_blocks(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copies the KV of blocks in order. Each copy is (source id, target id, KV group)."""

    def forward(self, batch: StepBatch, on_kv_written: Callable[[], object] | None) -> torch.Tensor:
        """Writes the KV of the batch's tokens and returns fp32 logits [rows that need logits,
        vocab].

        Calls `on_kv_written` once, as soon as all of the KV is in the pool. If `on_kv_written` is
        None, the device may still be computing when `forward` returns.
        """

    def sample(
        self, logits: torch.Tensor, draws: Sequence[Draw], rows: Sequence[int] | None = None
    ) -> list[int]:
        """Returns a sampled token id for each row of the last step's logits [n, vocab], or for each
        of `rows`.

        Waits for the device. The logits do not change.
        """

    def logprobs(
        self, logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], num_top: int
    ) -> Logprobs:
        """Returns the log probabilities of `token_ids`, one for each of `rows` of the last step's
        logits, and of the `num_top` most likely tokens of each row (fewer if the vocabulary is
        smaller)."""

    def final_hidden(self, rows: Sequence[int]) -> list[list[float]]:
        """Returns the hidden states after the final norm for `rows` of the last step's logits, each
        [hidden].

        The rows must belong to slices with `wants_hidden`.
        """

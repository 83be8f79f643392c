"""The protocol of what an engine runs steps on."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from tandem.engine.adapter_slots import AdapterRunner
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.scheduler.batch import StepBatch
from tandem_kernels.logprobs import Logprobs
from tandem_kernels.sampling import Draw


class Runner(AdapterRunner, Protocol):
    """Computes steps: a model and the tensor of its KV pools."""

    dtype_name: str
    numerics_name: str
    kv_dtype_name: str
    max_model_len: int
    vocab_size: int  # token ids are below it
    tokens_per_step: int  # the token budget of a step that suits the device
    why_no_budgets: str  # why no sequence can have a KV budget; empty: it can

    kv: torch.Tensor  # all pools, one after the other; after `allocate`

    def layout(self, *num_blocks: int) -> KvLayout:
        """Returns the layout of pools with so many blocks for each KV group; by default one."""

    def allocate(self, *num_blocks: int) -> None:
        """Makes pools with so many blocks for each KV group."""

    def copy_blocks(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copies the KV of blocks, one after the other: (source id, target id, KV group) each."""

    def forward(self, batch: StepBatch, on_kv_written: Callable[[], object] | None) -> torch.Tensor:
        """Writes the KV of the batch's tokens and returns fp32 logits [tokens in need, vocab].

        Calls `on_kv_written` once, as soon as all of the KV is in the pool. With None nobody waits
        for the KV, and the device may still be at work when this returns."""

    def sample(
        self, logits: torch.Tensor, draws: Sequence[Draw], rows: Sequence[int] | None = None
    ) -> list[int]:
        """Returns a token id for each row of the last step's logits [n, vocab], or for each of
        `rows`; waits for the device. The logits stay as they are."""

    def logprobs(
        self, logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], num_top: int
    ) -> Logprobs:
        """Returns the log probabilities of `token_ids`, one for each of `rows` of the last step's
        logits, and of the `num_top` most likely tokens there, or of the whole vocabulary if that
        has fewer tokens."""

    def final_hidden(self, rows: Sequence[int]) -> list[list[float]]:
        """Returns the hidden states after the final norm, for `rows` of the last step's logits.
        These rows must be of slices with `wants_hidden`."""

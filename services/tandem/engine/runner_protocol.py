"""The protocol of the model runner on which an engine runs its steps."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from tandem.common.config.engine import EngineConfig
from tandem.engine.adapter_slots import AdapterRunner
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.scheduler.batch import StepBatch
from tandem.engine.tiers.device.blocks import DeviceBlocks
from tandem_kernels.logprobs import Logprobs
from tandem_kernels.sampling import Draw


class DrawnTokens(Protocol):
    """The tokens of a sampling that was started."""

    def wait(self) -> list[int]:
        """Waits until the tokens are on the host, and returns their ids."""


class Runner(AdapterRunner, Protocol):
    """Runs the model for each step of an engine. Owns the model's weights and the KV pools."""

    dtype_name: str
    numerics_name: str
    kernels_name: str  # name of the kernels, such as "native (avx512)", "triton" or "torch"
    kv_dtype_name: str
    max_model_len: int
    vocab_size: int  # token ids are less than this number
    tokens_per_step: int  # the default token budget of a step on this device
    why_no_budgets: str  # reason why sequences cannot have KV budgets; empty if they can
    # Reason why no sequence may speculate (speculator.py); empty if sequences may.
    why_no_speculation: str
    # True: `forward` may be called with a batch that is launched ahead (StepBatch.is_ahead). It
    # pays if the host and the device work at the same time.
    launches_ahead: bool
    # True: several ranks compute a share of each row of logits, and exchange no more of them than
    # StepBatch.top_k says.
    shards_logits: bool
    # Number of ranks with a KV pool each, which has the heads of the rank; 1 if one pool has all
    # heads.
    num_pools: int

    kv: torch.Tensor  # all pools of rank 0, one after the other; set by `allocate`

    @property
    def draft(self) -> "Runner | None":
        """The runner of the draft model; None if there is none."""

    def layout(self, *num_blocks: int) -> KvLayout:
        """Returns the layout of whole blocks, with all heads, for these numbers of blocks, one
        number per KV group. Without numbers, each pool has one block."""

    def with_pool_size(self, config: EngineConfig, step_tokens: int) -> EngineConfig:
        """Returns the settings with the size of the KV pool for steps of at most `step_tokens`
        tokens. Called once, before `allocate`."""

    def allocate(self, *num_blocks: int) -> None:
        """Allocates one pool per KV group, with these numbers of blocks."""

    def tier_blocks(self, config: EngineConfig) -> Sequence[DeviceBlocks]:
        """Returns the blocks through which KV tiers copy, for each KV group. Called once, after
        `allocate`, and only if `num_pools` is more than 1. Raises ConfigError."""

    def copy_blocks(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copies blocks' KV in the order of `copies`. An item is (source id, target id, KV
        group)."""

    def store_states(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copies the states of sequences that steps have computed. An item is (slot of the
        sequence, target slot, KV group). The target may be the slot of the sequence."""

    def forward(self, batch: StepBatch, on_kv_written: Callable[[], object] | None) -> torch.Tensor:
        """Writes the KV of the batch's tokens and returns fp32 logits [rows that need logits,
        vocab].

        If `on_kv_written` is given, it is called once, as soon as all of the KV is in the pool. If
        it is None, the device may still be computing when `forward` returns.
        """

    def start_sampling(
        self, logits: torch.Tensor, draws: Sequence[Draw], rows: Sequence[int] | None = None
    ) -> DrawnTokens:
        """Samples one token for each of `rows` of `logits` [n, vocab], which are the logits of the
        last step. Without `rows`, samples one for each row.

        The device may still be computing when this returns. The logits do not change. The tokens
        must be waited for before the next sampling is started.
        """

    def synchronize(self) -> None:
        """Waits until the device has finished all steps, copies and samplings."""

    def logprobs(
        self, logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], num_top: int
    ) -> Logprobs:
        """Returns log probabilities computed from rows of the last step's logits. For the row
        `rows[i]`, the result has the log probability of the token `token_ids[i]` and of the
        `num_top` most likely tokens."""

    def final_hidden(self, rows: Sequence[int]) -> list[list[float]]:
        """Returns the hidden states after the final norm, each [hidden], from which the given rows
        of the last step's logits were computed.

        The rows must belong to slices of the batch with `wants_hidden`.
        """

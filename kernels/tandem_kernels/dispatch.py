"""Chooses the torch implementation of each operation by device and numerics.

The C++ and Triton kernels compute complete steps and do not use this module; the engine chooses
between them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tandem_kernels.attention import PagedAttention, scores
from tandem_kernels.attention_groups import AttentionGroup, Entries, QuerySpan
from tandem_kernels.attention_invariant import InvariantPagedAttention, scores_invariant
from tandem_kernels.key_choice import Choice, Scores
from tandem_kernels.kv_cache import KvPool
from tandem_kernels.linear import (
    TILE_ROWS,
    linear,
    linear_invariant,
    linear_of_heads,
    linear_of_heads_invariant,
)
from tandem_kernels.linear_attention import (
    StateSpan,
    gated_delta_rule,
    gated_delta_rule_recurrent,
    mamba2,
    mamba2_recurrent,
)
from tandem_kernels.norm import rms_norm
from tandem_kernels.rope import rotate

Angles = tuple[torch.Tensor, torch.Tensor]


class Linear(Protocol):
    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


class Attention(Protocol):
    """The attention of one step. `PagedAttention` documents the members."""

    @property
    def groups(self) -> list[AttentionGroup]: ...

    def __call__(
        self,
        layer: int,
        queries: torch.Tensor,
        sinks: torch.Tensor | None = None,
        choice: Choice | None = None,
        entries: Sequence[Entries] | None = None,
    ) -> torch.Tensor: ...


class MakeAttention(Protocol):
    def __call__(
        self,
        spans: Sequence[QuerySpan],
        pool: KvPool,
        num_heads: int,
        dtype: torch.dtype,
        window: int | None,
        scale: float,
        cap: float | None,
        chunk: int | None,
    ) -> Attention: ...


class DeltaRule(Protocol):
    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
        states: torch.Tensor,
        spans: Sequence[StateSpan],
    ) -> torch.Tensor: ...


class Mamba2Scan(Protocol):
    def __call__(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        a_log: torch.Tensor,
        d: torch.Tensor,
        dt_bias: torch.Tensor,
        dt_limits: tuple[float, float],
        states: torch.Tensor,
        spans: Sequence[StateSpan],
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """The operations for one device and numerics mode."""

    row_multiple: int  # the number of rows of activations must be a multiple of this
    linear: Linear
    linear_of_heads: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    attention: MakeAttention
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    rotate: Callable[[torch.Tensor, Angles], torch.Tensor]
    gated_delta_rule: DeltaRule
    mamba2: Mamba2Scan
    scores: Scores


def kernels_for(device_type: str, numerics: str) -> Kernels:
    """Returns the operations for a device type (cpu or cuda) and numerics (fast or invariant).
    Raises ValueError for another device type."""
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f"no kernels for device {device_type!r}; there are for cpu and cuda")
    if numerics == "invariant":
        return Kernels(
            TILE_ROWS,
            linear_invariant,
            linear_of_heads_invariant,
            InvariantPagedAttention,
            rms_norm,
            rotate,
            gated_delta_rule_recurrent,
            mamba2_recurrent,
            scores_invariant,
        )
    return Kernels(
        1,
        linear,
        linear_of_heads,
        PagedAttention,
        rms_norm,
        rotate,
        gated_delta_rule,
        mamba2,
        scores,
    )

"""Sizes of a model's KV, and what of it fits on a device. Pure.

All bytes come from `BlockLayout`, which an engine also allocates its pool by.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from tandem.common.config.engine import EngineConfig
from tandem.common.dtypes import KV_BITS
from tandem.engine.cache.layout.kv_groups import (
    STEP_TOKENS,
    KvLayout,
    divide_pool,
    model_layout,
)
from tandem.errors import ConfigError
from tandem.models.config.model import ModelConfig
from tandem.models.limits import why_not_kv_dtype
from tandem.models.shape import num_parameters
from tandem.transfer.tensor_parallel import ParallelLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSize:
    """The KV of one rank, in bytes. A sequence takes whole blocks."""

    attention: str  # MHA, GQA, MQA or MLA
    kv_heads: int  # of the model
    dtype: str
    computed_dtype: str  # of rotated keys beside quantized latents
    tensor_parallel: int
    heads_per_rank: int
    token_bytes: int | float  # a fraction where a block is padded
    block_bytes: int
    sequence_blocks: int  # in the group that sees furthest
    group_blocks: tuple[int, ...]  # of a sequence, in each KV group
    sequence_bytes: int
    batch_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFit:
    """A device's memory beside its rank's weights, in KV. `free_bytes` is at least 0."""

    dtype: str
    tensor_parallel: int
    weights_bytes: int
    free_bytes: int
    num_blocks: int  # in the group that sees furthest
    group_blocks: tuple[int, ...]  # in each KV group
    num_tokens: int
    num_sequences: int


def attention_name(model: ModelConfig) -> str:
    """Names the kind of attention by its heads (https://arxiv.org/abs/2305.13245)."""
    num_heads = model.num_attention_heads
    num_kv_heads = model.num_kv_heads
    if model.latent is not None:
        return "MLA"
    if num_kv_heads == num_heads:
        return "MHA"
    return "MQA" if num_kv_heads == 1 else "GQA"


def side_by_side(model: ModelConfig) -> list[ModelConfig]:
    """Returns the model with a KV head for each head, as it is, and with one KV head; one with
    latent attention as it is."""
    if model.latent is not None:
        return [model]
    heads = sorted({model.num_attention_heads, model.num_kv_heads, 1}, reverse=True)
    return [replace(model, num_kv_heads=count) for count in heads]


def kv_dtypes(model: ModelConfig) -> list[str]:
    """Returns the dtypes that the model's KV may have."""
    return [dtype for dtype in KV_BITS if not why_not_kv_dtype(model, dtype)]


def rank_layout(
    model: ModelConfig,
    *num_blocks: int,
    block_size: int,
    dtype: str,
    tensor_parallel: int,
    computed_dtype: str = "bfloat16",
) -> KvLayout:
    """Returns the layout of one rank's pools, with so many blocks for each group. Raises
    Incompatible for a degree that divides no heads."""
    whole = model_layout(
        model, num_blocks, block_size=block_size, dtype=dtype, computed_dtype=computed_dtype
    )
    return KvLayout(
        tuple(
            replace(group, layout=ParallelLayout(group.layout, tensor_parallel).rank_layout)
            for group in whole.groups
        )
    )


def kv_size(
    model: ModelConfig,
    dtype: str,
    *,
    block_size: int,
    tensor_parallel: int,
    context: int,
    batch: int,
    computed_dtype: str = "bfloat16",
) -> KvSize:
    """Computes the KV of `batch` sequences of `context` tokens each. Raises Incompatible."""
    layout = partial(
        rank_layout,
        model,
        block_size=block_size,
        dtype=dtype,
        tensor_parallel=tensor_parallel,
        computed_dtype=computed_dtype,
    )
    one = layout()
    blocks = one.sequence_blocks(context)
    whole, rest = divmod(one.block_bytes, block_size)
    return KvSize(
        attention=attention_name(model),
        kv_heads=model.num_kv_heads,
        dtype=dtype,
        computed_dtype=computed_dtype,
        tensor_parallel=tensor_parallel,
        heads_per_rank=one.groups[0].layout.num_kv_heads,
        token_bytes=one.block_bytes / block_size if rest else whole,
        block_bytes=one.block_bytes,
        sequence_blocks=max(blocks),
        group_blocks=blocks,
        sequence_bytes=layout(*blocks).pool_bytes,
        batch_bytes=layout(*(batch * count for count in blocks)).pool_bytes,
    )


def device_fit(
    model: ModelConfig,
    size: KvSize,
    *,
    block_size: int,
    memory_bytes: int,
    weight_bytes: int,
    reserve_bytes: int,
) -> DeviceFit:
    """Computes the KV that fits beside a rank's share of the weights, `weight_bytes` each.

    The engine's own rule makes blocks of the free memory, with an engine's default number of
    sequences, and of tokens in a step on a CPU.
    """
    weights_bytes = -(-num_parameters(model) * weight_bytes // size.tensor_parallel)
    free_bytes = max(0, memory_bytes - weights_bytes - reserve_bytes)
    try:
        config = EngineConfig(model="", block_size=block_size, kv_bytes_max=max(1, free_bytes))
        layout = partial(
            rank_layout,
            model,
            block_size=block_size,
            dtype=size.dtype,
            tensor_parallel=size.tensor_parallel,
            computed_dtype=size.computed_dtype,
        )
        blocks = tuple(divide_pool(layout, config, step_tokens=STEP_TOKENS).sizes)
    except ConfigError:  # not even one block
        blocks = (0,) * len(size.group_blocks)
    return DeviceFit(
        dtype=size.dtype,
        tensor_parallel=size.tensor_parallel,
        weights_bytes=weights_bytes,
        free_bytes=free_bytes,
        num_blocks=max(blocks),
        group_blocks=blocks,
        num_tokens=max(blocks) * block_size,
        num_sequences=min(
            held // taken for held, taken in zip(blocks, size.group_blocks, strict=True)
        ),
    )

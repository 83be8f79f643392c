"""Computes the size of a model's KV, and how much KV fits on a device. Does no I/O.

All sizes come from BlockLayout, the class from which an engine also computes the size of its KV
pool.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSize:
    """The size of a model's KV on one rank. A sequence occupies whole blocks."""

    attention: str  # kind of attention: MHA, GQA, MQA or MLA
    kv_heads: int  # number of KV heads in the whole model
    dtype: str
    # dtype in which the model computes. If latent KV (MLA) is quantized, the RoPE part of the keys
    # still has this dtype.
    computed_dtype: str
    state_dtype: str  # dtype of the states of linear attention
    tensor_parallel: int
    heads_per_rank: int
    token_bytes: int | float  # KV of one token; not an integer if blocks are padded
    block_bytes: int
    sequence_blocks: int  # largest number in `group_blocks`
    # for each KV group (the layers with the same attention window): blocks that one sequence needs
    group_blocks: tuple[int, ...]
    sequence_bytes: int
    batch_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFit:
    """How much KV fits on a device besides the weights of one rank. `free_bytes` is 0 if even the
    weights do not fit."""

    dtype: str
    tensor_parallel: int
    weights_bytes: int
    free_bytes: int
    num_blocks: int  # largest number in `group_blocks`
    # for each KV group (the layers with the same attention window): blocks that fit on the device
    group_blocks: tuple[int, ...]
    num_tokens: int
    num_sequences: int


def attention_name(model: ModelConfig) -> str:
    """Returns the kind of attention: MLA, MHA, MQA or GQA. The last three differ in the number of
    KV heads (https://arxiv.org/abs/2305.13245)."""
    num_heads = model.num_attention_heads
    num_kv_heads = model.num_kv_heads
    if model.latent is not None:
        return "MLA"
    if num_kv_heads == num_heads:
        return "MHA"
    return "MQA" if num_kv_heads == 1 else "GQA"


def kv_head_variants(model: ModelConfig) -> list[ModelConfig]:
    """Returns the model and variants with other numbers of KV heads, for comparison: as many as
    query heads (MHA), and 1 (MQA). A model with latent attention (MLA) has no variants, and neither
    has one whose keys are its values."""
    if model.latent is not None or model.shared_kv is not None:
        return [model]
    heads = sorted({model.num_attention_heads, model.num_kv_heads, 1}, reverse=True)
    return [replace(model, num_kv_heads=count) for count in heads]


def kv_dtypes(model: ModelConfig) -> list[str]:
    """Returns the KV dtypes that the model supports."""
    return [dtype for dtype in KV_BITS if not why_not_kv_dtype(model, dtype)]


def rank_layout(
    model: ModelConfig,
    *num_blocks: int,
    block_size: int,
    dtype: str,
    tensor_parallel: int,
    computed_dtype: str = "bfloat16",
    state_dtype: str = "float32",
) -> KvLayout:
    """Returns the layout of one rank's KV pools. `num_blocks` are the numbers of blocks, one for
    each KV group. Raises Incompatible if the KV heads cannot be divided among the ranks."""
    whole = model_layout(
        model,
        num_blocks,
        block_size=block_size,
        dtype=dtype,
        computed_dtype=computed_dtype,
        state_dtype=state_dtype,
    )
    return whole.of_rank(tensor_parallel)


def kv_size(
    model: ModelConfig,
    dtype: str,
    *,
    block_size: int,
    tensor_parallel: int,
    context: int,
    batch: int,
    computed_dtype: str = "bfloat16",
    state_dtype: str = "float32",
) -> KvSize:
    """Computes the size of the KV of `batch` sequences of `context` tokens each. Raises
    Incompatible if the KV heads cannot be divided among the ranks."""
    layout = partial(
        rank_layout,
        model,
        block_size=block_size,
        dtype=dtype,
        tensor_parallel=tensor_parallel,
        computed_dtype=computed_dtype,
        state_dtype=state_dtype,
    )
    one = layout()
    blocks = one.sequence_blocks(context)
    whole, rest = divmod(one.block_bytes, block_size)
    return KvSize(
        attention=attention_name(model),
        kv_heads=model.num_kv_heads,
        dtype=dtype,
        computed_dtype=computed_dtype,
        state_dtype=state_dtype,
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
    """Computes how much KV fits on a device besides the weights of one rank. `weight_bytes` is the
    size of one parameter, such as 2 for bfloat16. `reserve_bytes` remain free.

    The engine's function `divide_pool` divides the memory into blocks. The result also depends on
    the maximum number of sequences and of tokens in a step. This function uses the engine's
    defaults for both.
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
            state_dtype=size.state_dtype,
        )
        blocks = tuple(divide_pool(layout, config, step_tokens=STEP_TOKENS).sizes)
    except ConfigError:  # not even one block fits
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

"""Copies whole KV blocks on the device:

    pack          blocks of a pool -> a contiguous staging tensor, before a transfer
    unpack        a staging tensor -> blocks of a pool, after a transfer
    copy          blocks of a pool -> other blocks of it, or blocks of another pool
    pack_spans    like `pack`, for a layer-major pool

In a block-major pool, a block with all its layers is one contiguous span of memory. In a
layer-major pool, a block has one span in each layer.
"""

import math

import torch
import triton
import triton.language as tl

_WORDS = 2048  # 4-byte words that a program copies: with 4 warps, 4 loads of 16 bytes per thread


def pack(pool: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """Copies the blocks `block_ids` [n] int64 of a contiguous pool [num_blocks, ...] to a new
    tensor [n, ...]."""
    staging = pool.new_empty(len(block_ids), *pool.shape[1:])
    _move(_words(pool), _words(staging), block_ids, None)
    return staging


def unpack(staging: torch.Tensor, pool: torch.Tensor, block_ids: torch.Tensor) -> None:
    """Copies `staging` [n, ...] to the blocks `block_ids` [n] int64 of the pool. The ids must be
    distinct."""
    assert staging.dtype == pool.dtype
    assert len(staging) == len(block_ids)
    _move(_words(staging), _words(pool), None, block_ids)


def copy(
    source: torch.Tensor,
    source_ids: torch.Tensor,
    target: torch.Tensor,
    target_ids: torch.Tensor,
) -> None:
    """Copies block source_ids[i] of a pool [num_blocks, ...] to block target_ids[i] of a pool with
    blocks of the same shape. Each block is contiguous. The ids are [n] int64. Both pools may be the
    same one, but no block may be both read and written."""
    assert source.shape[1:] == target.shape[1:]
    assert len(source_ids) == len(target_ids)
    _move(_words(source), _words(target), source_ids, target_ids)


def pack_spans(layers: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """Copies blocks of a contiguous layer-major pool [num_layers, num_blocks, ...] to a new tensor
    [n, num_layers, ...]."""
    num_layers = layers.shape[0]
    staging = layers.new_empty(len(block_ids), num_layers, *layers.shape[2:])
    target = _words(staging).unflatten(2, (num_layers, -1)).squeeze(1)
    source = _words(layers).unflatten(2, (layers.shape[1], -1)).squeeze(1).transpose(0, 1)
    _move(source, target, block_ids, None)
    return staging


def _words(blocks: torch.Tensor) -> torch.Tensor:
    """Returns a view of blocks, each of which is contiguous, as int32 [n, 1, words], with one span
    per block."""
    assert blocks[:1].is_contiguous()
    return blocks.view(blocks.shape[0], 1, math.prod(blocks.shape[1:])).view(torch.int32)


def _move(
    source: torch.Tensor,
    target: torch.Tensor,
    source_ids: torch.Tensor | None,
    target_ids: torch.Tensor | None,
) -> None:
    """Copies block source_ids[i] of `source` to block target_ids[i] of `target`. Ids that are None
    stand for 0, 1, 2, and so on. Both tensors are [blocks, spans, words]."""
    ids = source_ids if source_ids is not None else target_ids
    assert ids is not None
    num_spans, num_words = target.shape[1:]
    if len(ids) == 0:
        return
    _move_words[(len(ids), num_spans, triton.cdiv(num_words, _WORDS))](
        source,
        target,
        source_ids,
        target_ids,
        source.stride(0),
        source.stride(1),
        target.stride(0),
        target.stride(1),
        num_words,
        WORDS=_WORDS,
        HAS_SOURCE_IDS=source_ids is not None,
        HAS_TARGET_IDS=target_ids is not None,
    )


@triton.jit
def _move_words(
    source,
    target,
    source_ids,
    target_ids,
    stride_source,
    stride_source_span,
    stride_target,
    stride_target_span,
    num_words,
    WORDS: tl.constexpr,
    HAS_SOURCE_IDS: tl.constexpr,
    HAS_TARGET_IDS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1).to(tl.int64)
    read = tl.load(source_ids + block) if HAS_SOURCE_IDS else block
    written = tl.load(target_ids + block) if HAS_TARGET_IDS else block
    words = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    is_word = words < num_words
    source_at = source + read * stride_source + span * stride_source_span + words
    target_at = target + written * stride_target + span * stride_target_span + words
    tl.store(target_at, tl.load(source_at, mask=is_word), mask=is_word)

"""Moves whole KV blocks: gathers them before a transfer, scatters them after one, and copies them
within a pool.

    pool [num_blocks, ...]   -- pack -->     staging [n, ...], block after block
    pool [num_blocks, ...]   <-- unpack --   staging [n, ...]

In a block-major pool, a block with all its layers is one contiguous span. In a layer-major pool, a
block has one span per layer; `pack_spans` packs such a pool.
"""

import math

import torch
import triton
import triton.language as tl

_WORDS = 2048  # 4-byte words per program: 8 KiB, 16 bytes per load of a thread with 4 warps


def pack(pool: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """Copies the blocks `block_ids` [n] int64 of a contiguous pool [num_blocks, ...] to a new
    tensor [n, ...]."""
    staging = pool.new_empty(len(block_ids), *pool.shape[1:])
    _move(_words(pool), _words(staging), block_ids, None)
    return staging


def unpack(staging: torch.Tensor, pool: torch.Tensor, block_ids: torch.Tensor) -> None:
    """Copies the blocks of `staging` [n, ...] into the pool's blocks `block_ids` [n] int64. The ids
    must be distinct."""
    assert staging.dtype == pool.dtype
    assert len(staging) == len(block_ids)
    _move(_words(staging), _words(pool), None, block_ids)


def copy(pool: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copies blocks within a pool; ids are [n] int64. No block may be both source and target."""
    assert len(sources) == len(targets)
    _move(_words(pool), _words(pool), sources, targets)


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
    """Views blocks as int32 [n, 1, words]: one span per block."""
    assert blocks.is_contiguous()
    return blocks.view(blocks.shape[0], 1, math.prod(blocks.shape[1:])).view(torch.int32)


def _move(
    source: torch.Tensor,
    target: torch.Tensor,
    source_ids: torch.Tensor | None,
    target_ids: torch.Tensor | None,
) -> None:
    """Copies block source_ids[i] of `source` to block target_ids[i] of `target`. If one of the
    lists is None, its i-th id is i. Both tensors are [blocks, spans, words]."""
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

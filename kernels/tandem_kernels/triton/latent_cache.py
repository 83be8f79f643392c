"""Fuses into one kernel the operations of latent attention that come after its projections and
before the attention itself:

                                           operation     result
    latent of a token                      normalized    stored in the pool
    key of a token                         rotated       stored in the pool, after the latent
    last elements of a head's query        rotated       returned

RoPE (arXiv:2104.09864) rotates element i with element i + rope / 2, as in rope.py.
"""

import torch
import triton
import triton.language as tl

from tandem_kernels.triton.rope_cache import Angles
from tandem_kernels.triton.tuning import next_power_of_2

_HEADS = 16  # query heads per program


def rotate_and_store_latents(
    queries: torch.Tensor,
    kv: torch.Tensor,
    angles: Angles,
    slots: torch.Tensor,
    layer_kv: torch.Tensor,
    *,
    norm: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Stores the tokens' KV in the pool, and returns the rotated part of the queries, [T, heads,
    rope], in the same dtype.

    queries   [T, heads, plain + rope]; tokens may be strided
    kv        [T, rank + rope]: latents and keys; tokens may be strided
    angles    cosines and sines of rope.rotary_angles, each [T, 1, rope / 2] fp32
    slots     [T] int32 or int64: block id * block size + offset; negative: the token is not stored
    layer_kv  [num_blocks, 1, 1, block size, rank + rope]: `numbers` of KvPool.layer
    norm      [rank]: weights of an RMS norm of latents, with `eps`
    """
    num_tokens, num_heads, q_dim = queries.shape
    (rank,), block_size = norm.shape, layer_kv.shape[3]
    rope = kv.shape[1] - rank
    assert queries.stride()[1:] == (q_dim, 1)
    assert kv.stride(1) == 1
    assert layer_kv.shape[4] == rank + rope
    assert layer_kv.stride()[3:] == (rank + rope, 1)
    cosines, sines = (angle.contiguous() for angle in angles)
    rotated = queries.new_empty(num_tokens, num_heads, rope)
    _rotate_and_store_latents[(num_tokens, 1 + triton.cdiv(num_heads, _HEADS))](
        queries,
        kv,
        cosines,
        sines,
        slots,
        rotated,
        layer_kv,
        norm,
        eps,
        queries.stride(0),
        kv.stride(0),
        layer_kv.stride(0),
        NUM_HEADS=num_heads,
        Q_DIM=q_dim,
        RANK=rank,
        BLOCK_RANK=next_power_of_2(rank),
        ROPE=rope,
        PAIRS=next_power_of_2(rope // 2),
        BLOCK_SIZE=block_size,
        HEADS=_HEADS,
    )
    return rotated


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _rotate_and_store_latents(
    queries,
    kv,
    cosines,
    sines,
    slots,
    rotated,
    pool,
    norm,
    eps,
    stride_query,
    stride_kv,
    stride_block,
    NUM_HEADS: tl.constexpr,
    Q_DIM: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
):
    HALF: tl.constexpr = ROPE // 2
    dtype: tl.constexpr = rotated.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    pairs = tl.arange(0, PAIRS)
    is_pair = pairs < HALF
    cos = tl.load(cosines + token * HALF + pairs, mask=is_pair, other=0.0)
    sin = tl.load(sines + token * HALF + pairs, mask=is_pair, other=0.0)
    if tl.program_id(1) == 0:
        slot = tl.load(slots + token).to(tl.int64)
        row = pool + (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * (RANK + ROPE)
        ranks = tl.arange(0, BLOCK_RANK)
        is_rank = ranks < RANK
        latent = tl.load(kv + token * stride_kv + ranks, mask=is_rank, other=0.0).to(tl.float32)
        latent = latent * tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps)
        weights = tl.load(norm + ranks, mask=is_rank, other=0.0).to(tl.float32)
        # If the norm's weights have the dtype of the latents, the torch code rounds before it
        # multiplies by the weights. This kernel must give the same result.
        if norm.dtype.element_ty == dtype:
            latent = latent.to(dtype).to(tl.float32)
        latent = (latent * weights).to(dtype)
        tl.store(
            row + ranks, latent.to(pool.dtype.element_ty), mask=ranks < tl.where(slot < 0, 0, RANK)
        )
        key_at = kv + token * stride_kv + RANK + pairs
        key_first, key_second = _rotated(key_at, cos, sin, is_pair, HALF)
        key_first, key_second = key_first.to(dtype), key_second.to(dtype)
        is_stored = pairs < tl.where(slot < 0, 0, HALF)
        tl.store(row + RANK + pairs, key_first.to(pool.dtype.element_ty), mask=is_stored)
        tl.store(row + RANK + HALF + pairs, key_second.to(pool.dtype.element_ty), mask=is_stored)
    else:
        heads = ((tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS))[:, None]
        is_element = (heads < NUM_HEADS) & is_pair[None, :]
        turning = queries + token * stride_query + heads * Q_DIM + (Q_DIM - ROPE) + pairs[None, :]
        first, second = _rotated(turning, cos[None, :], sin[None, :], is_element, HALF)
        places = rotated + (token * NUM_HEADS + heads) * ROPE + pairs[None, :]
        tl.store(places, first.to(dtype), mask=is_element)
        tl.store(places + HALF, second.to(dtype), mask=is_element)


@triton.jit
def _rotated(at, cos, sin, is_element, HALF: tl.constexpr):
    """Loads rows, rotates them, and returns the two halves of the result in fp32."""
    first = tl.load(at, mask=is_element, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=is_element, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin

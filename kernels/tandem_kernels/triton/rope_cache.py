"""Fuses the operations between the QKV projection and attention into one kernel:

         operations                                              result
    q    normalized per head (only some models), then rotated    returned
    k    normalized per head (only some models), then rotated    stored in the pool
    v    none                                                    stored in the pool

RoPE (arXiv:2104.09864) rotates element i of a head with element i + D / 2, as in rope.py.
"""

import torch
import triton
import triton.language as tl

from tandem_kernels.triton.kv_rows import check_scales, has_scales, numbers_of, scales_of
from tandem_kernels.triton.tuning import next_power_of_2

Angles = tuple[torch.Tensor, torch.Tensor]

_HEADS = 8  # heads per program


def rotate_and_store(
    qkv: torch.Tensor,
    angles: Angles,
    slots: torch.Tensor,
    layer_kv: torch.Tensor,
    *,
    num_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    scales: torch.Tensor | None = None,
    fixed_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Stores K and V in the pool, and returns the rotated queries [T, heads, D] in the dtype of
    `qkv`.

    qkv       [T, (heads + 2 KV heads) * D]: q, k, v side by side
    angles    cosines and sines of rope.rotary_angles, each [T, 1, D / 2] fp32
    slots     [T] int32 or int64: block id * block size + offset; negative: the token is not stored
    layer_kv  [num_blocks, KV heads, 2, block size, D]: `numbers` of KvPool.layer
    scales    [num_blocks, KV heads, 2, block size] float16: `scales` of KvPool.layer; None: the
              pool is not quantized
    fixed_scales    [2] float16: static scales of K and V; None: each row has its own
    q_norm, k_norm  [D]: weights of an RMS norm of each head before the rotation, with `eps`
    """
    num_kv_heads, _, block_size, head_dim = layer_kv.shape[1:]
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim
    assert qkv.stride(1) == 1
    assert layer_kv.stride()[3:] == (head_dim, 1)
    assert (q_norm is None) == (k_norm is None)
    check_scales(layer_kv, scales)
    cosines, sines = (angle.contiguous() for angle in angles)
    num_tokens = qkv.shape[0]
    queries = qkv.new_empty(num_tokens, num_heads, head_dim)
    _rotate_and_store[(num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, _HEADS))](
        qkv,
        cosines,
        sines,
        slots,
        queries,
        layer_kv,
        layer_kv if scales is None else scales,
        layer_kv if fixed_scales is None else fixed_scales,
        q_norm,
        k_norm,
        eps,
        qkv.stride(0),
        layer_kv.stride(0),
        layer_kv.stride(1),
        layer_kv.stride(2),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAIRS=next_power_of_2(head_dim // 2),
        BLOCK_SIZE=block_size,
        HEADS=_HEADS,
        HAS_NORM=q_norm is not None,
        HAS_FIXED=fixed_scales is not None,
    )
    return queries


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _rotate_and_store(
    qkv,
    cosines,
    sines,
    slots,
    queries,
    kv,
    kv_scales,
    fixed_scales,
    q_norm,
    k_norm,
    eps,
    stride_token,
    stride_block,
    stride_head,
    stride_kv,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_FIXED: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    pairs = tl.arange(0, PAIRS)[None, :]
    is_pair = pairs < HALF
    is_query = heads < NUM_HEADS
    is_value = heads >= NUM_HEADS + NUM_KV_HEADS
    is_element = (heads < NUM_HEADS + 2 * NUM_KV_HEADS) & is_pair

    places = qkv + token * stride_token + heads * HEAD_DIM + pairs
    first = tl.load(places, mask=is_element, other=0.0).to(tl.float32)
    second = tl.load(places + HALF, mask=is_element, other=0.0).to(tl.float32)
    plain_first, plain_second = first, second
    if HAS_NORM:
        squares = tl.sum(first * first + second * second, 1)
        factor = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        first = _apply_norm_weights(
            first * factor, q_norm, k_norm, queries, is_query, pairs, is_pair
        )
        second = _apply_norm_weights(
            second * factor, q_norm + HALF, k_norm + HALF, queries, is_query, pairs, is_pair
        )
    cos = tl.load(cosines + token * HALF + pairs, mask=is_pair, other=0.0)
    sin = tl.load(sines + token * HALF + pairs, mask=is_pair, other=0.0)
    out_first = tl.where(is_value, plain_first, first * cos - second * sin)
    out_second = tl.where(is_value, plain_second, second * cos + first * sin)

    query_at = queries + (token * NUM_HEADS + heads) * HEAD_DIM + pairs
    tl.store(query_at, out_first.to(queries.dtype.element_ty), mask=is_query & is_pair)
    tl.store(query_at + HALF, out_second.to(queries.dtype.element_ty), mask=is_query & is_pair)

    slot = tl.load(slots + token).to(tl.int64)
    kv_heads = tl.where(is_value, heads - NUM_HEADS - NUM_KV_HEADS, heads - NUM_HEADS)
    is_kept = heads >= tl.where(slot < 0, 2147483647, NUM_HEADS)
    is_kept &= heads < NUM_HEADS + 2 * NUM_KV_HEADS
    is_stored = is_kept & is_pair
    span = (slot // BLOCK_SIZE) * stride_block + kv_heads * stride_head
    kv_at = kv + span + is_value * stride_kv + (slot % BLOCK_SIZE) * HEAD_DIM + pairs
    if has_scales(kv.dtype):
        dtype: tl.constexpr = queries.dtype.element_ty
        first = out_first.to(dtype).to(tl.float32)  # rounded as the torch code does
        second = out_second.to(dtype).to(tl.float32)
        scales, divisors = scales_of(first, second, kv, fixed_scales, is_value, HAS_FIXED)
        scales_at = kv_scales + span // 2 + is_value * BLOCK_SIZE + slot % BLOCK_SIZE
        tl.store(scales_at, scales, mask=is_kept)
        tl.store(kv_at, numbers_of(first, divisors, kv), mask=is_stored)
        tl.store(kv_at + HALF, numbers_of(second, divisors, kv), mask=is_stored)
    else:
        tl.store(kv_at, out_first.to(kv.dtype.element_ty), mask=is_stored)
        tl.store(kv_at + HALF, out_second.to(kv.dtype.element_ty), mask=is_stored)


@triton.jit
def _apply_norm_weights(x, q_norm, k_norm, queries, is_query, pairs, is_pair):
    """Multiplies x by the norm weights of queries or keys. As the torch code does, rounds the
    product to the dtype of the queries, and also rounds x before if the weights have this dtype."""
    dtype: tl.constexpr = queries.dtype.element_ty
    query_weights = tl.load(q_norm + pairs, mask=is_pair, other=0.0).to(tl.float32)
    key_weights = tl.load(k_norm + pairs, mask=is_pair, other=0.0).to(tl.float32)
    weights = tl.where(is_query, query_weights, key_weights)
    if q_norm.dtype.element_ty == dtype:
        x = x.to(dtype).to(tl.float32)
    return (x * weights).to(dtype).to(tl.float32)

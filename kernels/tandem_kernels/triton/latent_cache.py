"""Fuses into one kernel the operations on the latents of tokens before the products that read them:

                                           operation     result
    latent of a token                      normalized    stored in the pool
    key of a token                         rotated       stored in the pool, after the latent
    latent of a token's queries            normalized    returned

Not all models have latents of queries. The queries themselves are rotated by the kernels of the
attention (latent_loop.py).
"""

import torch
import triton
import triton.language as tl

from tandem_kernels.triton.norm import normalized
from tandem_kernels.triton.rope_cache import Angles
from tandem_kernels.triton.tuning import next_power_of_2


def norm_and_store_latents(
    kv: torch.Tensor,
    angles: Angles,
    slots: torch.Tensor,
    layer_kv: torch.Tensor,
    *,
    norm: torch.Tensor,
    eps: float,
    queries: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Stores the tokens' KV in the pool. Returns the normalized latents of the queries, [T, q rank]
    in the same dtype; None if there are none.

    kv        [T, rank + rope]: latents and keys; tokens may be strided
    angles    cosines and sines of rope.rotary_angles, each [T, 1, rope / 2] fp32
    slots     [T] int32 or int64: block id * block size + offset; negative: the token is not stored
    layer_kv  [num_blocks, 1, 1, block size, rank + rope]: `numbers` of KvPool.layer
    norm      [rank]: weights of an RMS norm of latents, with `eps`
    queries   [T, q rank]: latents of queries, or None; tokens may be strided
    q_norm    [q rank]: weights of the RMS norm of `queries`, in the dtype of `norm`
    """
    num_tokens = len(kv)
    (rank,), block_size = norm.shape, layer_kv.shape[3]
    rope = kv.shape[1] - rank
    assert kv.stride(1) == 1
    assert layer_kv.shape[4] == rank + rope
    assert layer_kv.stride()[3:] == (rank + rope, 1)
    cosines, sines = (angle.contiguous() for angle in angles)
    out = None
    if queries is not None:
        assert q_norm is not None
        assert q_norm.dtype == norm.dtype
        assert queries.stride(1) == 1
        out = queries.new_empty(queries.shape)
    q_rank = 0 if queries is None else queries.shape[1]
    _norm_and_store_latents[(num_tokens, 1 if queries is None else 2)](
        # Without latents of queries, the kernel does not read these arguments.
        kv if queries is None else queries,
        norm if q_norm is None else q_norm,
        kv if out is None else out,
        kv,
        cosines,
        sines,
        slots,
        layer_kv,
        norm,
        eps,
        0 if queries is None else queries.stride(0),
        kv.stride(0),
        layer_kv.stride(0),
        Q_RANK=q_rank,
        BLOCK_Q_RANK=next_power_of_2(max(1, q_rank)),
        RANK=rank,
        BLOCK_RANK=next_power_of_2(rank),
        ROPE=rope,
        PAIRS=next_power_of_2(rope // 2),
        BLOCK_SIZE=block_size,
    )
    return out


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _norm_and_store_latents(
    queries,
    q_norm,
    out,
    kv,
    cosines,
    sines,
    slots,
    pool,
    norm,
    eps,
    stride_query,
    stride_kv,
    stride_block,
    Q_RANK: tl.constexpr,
    BLOCK_Q_RANK: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    HALF: tl.constexpr = ROPE // 2
    dtype: tl.constexpr = kv.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        slot = tl.load(slots + token).to(tl.int64)
        row = pool + (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * (RANK + ROPE)
        ranks = tl.arange(0, BLOCK_RANK)
        is_rank = ranks < RANK
        latent = tl.load(kv + token * stride_kv + ranks, mask=is_rank, other=0.0).to(tl.float32)
        latent = normalized(latent, norm, eps, ranks, is_rank, RANK, dtype).to(dtype)
        tl.store(
            row + ranks, latent.to(pool.dtype.element_ty), mask=ranks < tl.where(slot < 0, 0, RANK)
        )
        pairs = tl.arange(0, PAIRS)
        is_pair = pairs < HALF
        cos = tl.load(cosines + token * HALF + pairs, mask=is_pair, other=0.0)
        sin = tl.load(sines + token * HALF + pairs, mask=is_pair, other=0.0)
        key_at = kv + token * stride_kv + RANK + pairs
        first = tl.load(key_at, mask=is_pair, other=0.0).to(tl.float32)
        second = tl.load(key_at + HALF, mask=is_pair, other=0.0).to(tl.float32)
        key_first = (first * cos - second * sin).to(dtype)
        key_second = (second * cos + first * sin).to(dtype)
        is_stored = pairs < tl.where(slot < 0, 0, HALF)
        tl.store(row + RANK + pairs, key_first.to(pool.dtype.element_ty), mask=is_stored)
        tl.store(row + RANK + HALF + pairs, key_second.to(pool.dtype.element_ty), mask=is_stored)
    else:
        columns = tl.arange(0, BLOCK_Q_RANK)
        is_column = columns < Q_RANK
        at = queries + token * stride_query + columns
        of_queries = tl.load(at, mask=is_column, other=0.0).to(tl.float32)
        of_queries = normalized(of_queries, q_norm, eps, columns, is_column, Q_RANK, dtype)
        tl.store(out + token * Q_RANK + columns, of_queries.to(dtype), mask=is_column)

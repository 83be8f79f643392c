"""Latent decode attention: one query per sequence over the latents in paged KV.

Each context is split into ranges of tokens. There is one program for each sequence, range and tile
of heads. All heads attend to the same latents, so a tile has as many heads as the registers allow.
The second kernel of decode_attention.py combines the results of the ranges.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tandem_kernels.triton.attention_loop import LOG2_E, start_state
from tandem_kernels.triton.decode_attention import (
    Splits,
    choose_splits,
    join_splits,
    range_len,
)
from tandem_kernels.triton.latent_loop import (
    LatentQueries,
    attend_latents,
    check_latents,
    load_queries,
)
from tandem_kernels.triton.tuning import device_name, next_power_of_2, tuned

_HEADS_MAX = 64  # largest number of heads in a tile


def latent_decode_attention(
    queries: LatentQueries,
    layer_kv: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    splits: Splits,
    scale: float,
) -> torch.Tensor:
    """Returns the attended latents [B, heads, rank], in the queries' dtype.

    queries       one token per sequence
    layer_kv      [num_blocks, 1, 1, block size, rank + rope]: `numbers` of KvPool.layer
    block_tables  [B, M] int32: the block ids of each of the B sequences
    context_lens  [B] int32, including the query's own token; if 0, the output is zeros
    scale         factor on scores
    """
    absorbed, rotated = queries
    num_seqs, num_heads, rank = absorbed.shape
    rope = rotated.shape[2]
    check_latents(queries, layer_kv)
    out = absorbed.new_empty(num_seqs, num_heads, rank)
    num_splits = splits.num_splits
    if num_splits == 1:
        # With one split the kernel does not write `log_sums`, so any tensor can be passed.
        partials, log_sums = out.unsqueeze(2), out
    else:
        shape = (num_seqs, num_heads, num_splits)
        partials = absorbed.new_empty((*shape, rank), dtype=torch.float32)
        log_sums = absorbed.new_empty(shape, dtype=torch.float32)

    def grid(config: dict[str, Any]) -> tuple[int, int, int]:
        return num_seqs, triton.cdiv(num_heads, config["ROWS"]), num_splits

    _attend_latent_split[grid](
        absorbed,
        rotated,
        layer_kv,
        block_tables,
        context_lens,
        partials,
        log_sums,
        absorbed.stride(0),
        absorbed.stride(1),
        layer_kv.stride(0),
        block_tables.stride(0),
        scale * LOG2_E.value,
        *splits,
        NUM_HEADS=num_heads,
        RANK=rank,
        BLOCK_RANK=max(16, next_power_of_2(rank)),
        ROPE=rope,
        BLOCK_ROPE=max(16, next_power_of_2(rope)),
        BLOCK_SIZE=layer_kv.shape[3],
        DEVICE=device_name(absorbed.device),
    )
    if num_splits > 1:
        join_splits(partials, log_sums, out)
    return out


def choose_latent_splits(
    num_seqs: int, num_heads: int, context_len_max: int, num_multiprocessors: int
) -> Splits:
    """Returns the numbers of ranges as choose_splits does, for one program per multiprocessor,
    because a program of latent attention uses all shared memory of a multiprocessor."""
    num_tiles = triton.cdiv(num_heads, _HEADS_MAX)
    return choose_splits(num_seqs, num_tiles, context_len_max, num_multiprocessors, programs=1)


@tuned(
    [
        triton.Config({"ROWS": rows, "KEYS": keys}, num_warps=num_warps, num_stages=num_stages)
        for rows, keys, num_warps, num_stages in (
            (16, 32, 4, 2),
            (16, 64, 8, 2),
            (16, 16, 4, 2),
            (32, 32, 8, 2),
            (32, 64, 8, 2),
            (_HEADS_MAX, 16, 8, 2),
            (_HEADS_MAX, 32, 8, 2),
        )
    ],
    key=["NUM_HEADS", "RANK", "ROPE", "BLOCK_SIZE", "num_splits"],
)
@triton.jit(
    do_not_specialize=["num_splits", "num_filling", "stride_table"],
    do_not_specialize_on_alignment=["block_tables", "context_lens"],
)
def _attend_latent_split(
    absorbed,
    rotated,
    kv,
    block_tables,
    context_lens,
    partials,
    log_sums,
    stride_token,
    stride_head,
    stride_block,
    stride_table,
    scale,
    num_splits,
    num_filling,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DEVICE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    context_len = tl.load(context_lens + seq)
    split_len = range_len(context_len, num_splits, num_filling, KEYS)
    first = split * split_len
    end = tl.minimum(first + split_len, context_len)

    heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = heads < NUM_HEADS
    tokens = tl.zeros((ROWS,), tl.int64) + seq
    q_latent, q_turned = load_queries(
        absorbed,
        rotated,
        tokens,
        heads,
        is_row,
        stride_token,
        stride_head,
        NUM_HEADS,
        RANK,
        BLOCK_RANK,
        ROPE,
        BLOCK_ROPE,
    )
    last_keys = tl.zeros((ROWS,), tl.int32) + context_len - 1
    accumulator, sums, maxima = attend_latents(
        start_state(ROWS, BLOCK_RANK),
        (q_latent, q_turned, last_keys),
        first,
        end,
        (kv, block_tables + seq * stride_table, stride_block, scale),
        RANK,
        BLOCK_RANK,
        ROPE,
        BLOCK_ROPE,
        BLOCK_SIZE,
        KEYS,
        True,
    )
    is_empty = sums == 0.0  # true if the range has no keys
    sums = tl.where(is_empty, 1.0, sums)
    result = accumulator / sums[:, None]
    ranks = tl.arange(0, BLOCK_RANK)
    parts = (seq * NUM_HEADS + heads) * num_splits + split
    tl.store(
        partials + parts[:, None] * RANK + ranks[None, :],
        result.to(partials.dtype.element_ty),
        mask=is_row[:, None] & (ranks < RANK)[None, :],
    )
    if num_splits > 1:
        log_sum = tl.where(is_empty, float("-inf"), maxima + tl.log2(sums))
        tl.store(log_sums + parts, log_sum, mask=is_row)

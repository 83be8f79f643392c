"""Latent prefill attention: causal attention for chunks of several sequences, in one launch.

The rows, pairs of a query and a head, are divided into tiles as in prefill_attention.py, with a
single KV head. Each latent is read once for all rows of a tile.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tandem_kernels.triton.attention_loop import LOG2_E, start_state
from tandem_kernels.triton.latent_loop import (
    LatentQueries,
    attend_latents,
    check_latents,
    load_queries,
)
from tandem_kernels.triton.prefill_attention import SMALL_TOKENS, tile_of
from tandem_kernels.triton.tuning import device_name, next_power_of_2, tuned

# Largest number of elements of accumulators per warp. With twice as many, registers spill.
_TILE_PER_WARP_MAX = 2048


def latent_prefill_attention(
    queries: LatentQueries,
    layer_kv: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """Returns the attended latents [T, heads, rank], in the queries' dtype. The KV of the chunks
    must already be in the pool.

    layer_kv      [num_blocks, 1, 1, block size, rank + rope]: `numbers` of KvPool.layer
    block_tables, context_lens, query_starts    as for prefill_attention
    scale         factor on scores
    """
    absorbed, turning = queries.absorbed, queries.turning
    num_tokens, num_heads, rank = absorbed.shape
    num_seqs, rope = context_lens.shape[0], turning.shape[2]
    check_latents(queries, layer_kv)
    out = absorbed.new_empty(num_tokens, num_heads, rank)

    def grid(config: dict[str, Any]) -> tuple[int]:
        return (num_tokens * num_heads // config["ROWS"] + num_seqs,)

    _attend_latent_chunks[grid](
        *queries,
        layer_kv,
        block_tables,
        context_lens,
        query_starts,
        out,
        num_seqs,
        *queries.strides,
        layer_kv.stride(0),
        block_tables.stride(0),
        scale * LOG2_E.value,
        2 if num_tokens <= SMALL_TOKENS else 3,
        NUM_HEADS=num_heads,
        RANK=rank,
        BLOCK_RANK=max(16, next_power_of_2(rank)),
        ROPE=rope,
        BLOCK_ROPE=max(16, next_power_of_2(rope)),
        BLOCK_SIZE=layer_kv.shape[3],
        DEVICE=device_name(absorbed.device),
    )
    return out


def _fits(config: triton.Config, arguments: Mapping[str, Any], arch: int) -> bool:
    """Returns whether the accumulators of a tile fit into registers."""
    tile = config.kwargs["ROWS"] * arguments["BLOCK_RANK"]
    return bool(tile <= _TILE_PER_WARP_MAX * config.num_warps)


@tuned(
    [
        triton.Config({"ROWS": rows, "KEYS": keys}, num_warps=num_warps, num_stages=num_stages)
        for rows, keys, num_warps, num_stages in (
            (64, 32, 8, 2),
            (16, 32, 4, 2),
            (16, 16, 4, 2),
            (32, 32, 8, 2),
            (32, 64, 8, 2),
            (64, 16, 8, 2),
            (64, 32, 8, 1),
        )
    ],
    key=["NUM_HEADS", "RANK", "ROPE", "BLOCK_SIZE", "size_class"],
    fits=_fits,
)
@triton.jit(
    do_not_specialize=["num_seqs", "size_class", "stride_table"],
    do_not_specialize_on_alignment=["block_tables", "context_lens", "query_starts"],
)
def _attend_latent_chunks(
    absorbed,
    turning,
    cosines,
    sines,
    kv,
    block_tables,
    context_lens,
    query_starts,
    out,
    num_seqs,
    stride_token,
    stride_head,
    stride_turning,
    stride_turning_head,
    stride_block,
    stride_table,
    scale,
    size_class,
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
    program = tl.program_id(0)
    seq, start, num_queries, first_row = tile_of(program, query_starts, num_seqs, NUM_HEADS, ROWS)
    if first_row < 0:
        return
    prefix_len = tl.load(context_lens + seq) - num_queries

    rows = first_row + tl.arange(0, ROWS)
    row_queries = rows // NUM_HEADS
    heads = rows % NUM_HEADS
    is_row = row_queries < num_queries
    tokens = (start + row_queries).to(tl.int64)
    q_latent, q_turned = load_queries(
        (absorbed, turning, cosines, sines),
        (stride_token, stride_head, stride_turning, stride_turning_head),
        tokens,
        heads,
        is_row,
        RANK,
        BLOCK_RANK,
        ROPE,
        BLOCK_ROPE,
    )
    tile = (q_latent, q_turned, prefix_len + row_queries)
    paged = (kv, block_tables + seq.to(tl.int64) * stride_table, stride_block, scale)
    seen_by_all = (prefix_len + first_row // NUM_HEADS + 1) // KEYS * KEYS
    last_query = tl.minimum((first_row + ROWS - 1) // NUM_HEADS, num_queries - 1)
    end = prefix_len + last_query + 1
    state = attend_latents(
        start_state(ROWS, BLOCK_RANK),
        tile,
        0,
        seen_by_all,
        paged,
        RANK,
        BLOCK_RANK,
        ROPE,
        BLOCK_ROPE,
        BLOCK_SIZE,
        KEYS,
        False,
    )
    accumulator, sums, _maxima = attend_latents(
        state,
        tile,
        seen_by_all,
        end,
        paged,
        RANK,
        BLOCK_RANK,
        ROPE,
        BLOCK_ROPE,
        BLOCK_SIZE,
        KEYS,
        True,
    )
    ranks = tl.arange(0, BLOCK_RANK)
    places = (tokens * NUM_HEADS + heads)[:, None] * RANK + ranks[None, :]
    result = accumulator / sums[:, None]
    is_element = is_row[:, None] & (ranks < RANK)[None, :]
    tl.store(out + places, result.to(out.dtype.element_ty), mask=is_element)

"""Latent decode attention: one query per sequence over the latents in paged KV.

Each context is split into ranges of tokens. There is one program for each sequence, range and tile
of heads. All heads attend to the same latents, so a tile has as many heads as the registers allow.
A second kernel combines the results of the ranges. `_weigh_splits` of decode_attention.py does only
this, and `_project_splits` also multiplies each head by its matrix W_v.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tandem_kernels.triton.attention_loop import LOG2_E, product, start_state
from tandem_kernels.triton.decode_attention import (
    Splits,
    choose_splits,
    chosen_arguments,
    chosen_constants,
    join_splits,
    range_len,
    sequence_of,
)
from tandem_kernels.triton.key_choice import ChosenKeys
from tandem_kernels.triton.latent_loop import (
    LatentQueries,
    attend_latents,
    check_latents,
    load_queries,
)
from tandem_kernels.triton.tuning import device_name, next_power_of_2, tuned

_HEADS_MAX = 64  # largest number of heads in a tile
# Sizes of tiles of `_project_splits`.
_SINGLE_SEQS_MAX = 4  # of more sequences, several are in a tile
_SEQS = 16
_PARTS = 64  # results of ranges, of all sequences of the tile, that are combined at once
_RANKS = 64  # elements of latents


def latent_decode_attention(
    queries: LatentQueries,
    layer_kv: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    splits: Splits,
    scale: float,
    values: torch.Tensor | None = None,
    chosen: ChosenKeys | None = None,
) -> torch.Tensor:
    """Returns the attended latents [B, heads, rank], in the queries' dtype; with `values`, their
    products with the heads' matrices, [B, heads, value].

    queries       one token per sequence
    layer_kv      [num_blocks, 1, 1, block size, rank + rope]: `numbers` of KvPool.layer
    block_tables  [B, M] int32: the block ids of each of the B sequences
    context_lens  [B] int32, including the query's own token; if 0, the output is zeros
    scale         factor on scores
    values        [heads, value, rank]: W_v of each head
    chosen        as for decode_attention, with one list for all heads
    """
    absorbed, turning = queries.absorbed, queries.turning
    num_seqs, num_heads, rank = absorbed.shape
    rope = turning.shape[2]
    check_latents(queries, layer_kv)
    assert chosen is None or chosen.units.shape[:2] == (num_seqs, 1)
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
        *queries,
        layer_kv,
        block_tables,
        context_lens,
        partials,
        log_sums,
        *chosen_arguments(chosen, context_lens),
        *queries.strides,
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
        **chosen_constants(chosen),
        DEVICE=device_name(absorbed.device),
    )
    if num_splits == 1:
        return out if values is None else values_of_heads(out, values)
    if values is not None:
        return _projected_splits(partials, log_sums, values)
    join_splits(partials, log_sums, out)
    return out


def values_of_heads(latents: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Multiplies attended latents [T, heads, rank] by `values` [heads, value, rank]. Returns [T,
    heads, value], contiguous, so that the heads of a token are one row without a copy."""
    out = latents.new_empty(len(latents), *values.shape[:2])
    torch.bmm(latents.transpose(0, 1), values.transpose(1, 2), out=out.transpose(0, 1))
    return out


def _projected_splits(
    partials: torch.Tensor, log_sums: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Combines the results of the ranges, `partials` [B, heads, splits, rank], and multiplies them
    by `values`. Returns [B, heads, value]."""
    num_seqs, num_heads, num_splits, rank = partials.shape
    num_values = values.shape[1]
    assert values.stride()[1:] == (rank, 1)
    out = values.new_empty(num_seqs, num_heads, num_values)
    # A tile of few sequences combines more ranges at once.
    seqs = 1 if num_seqs <= _SINGLE_SEQS_MAX else _SEQS
    _project_splits[(triton.cdiv(num_seqs, seqs), num_heads)](
        partials,
        log_sums,
        values,
        out,
        num_seqs,
        num_splits,
        values.stride(0),
        NUM_HEADS=num_heads,
        RANK=rank,
        NUM_VALUES=num_values,
        BLOCK_VALUES=max(16, next_power_of_2(num_values)),
        SEQS=seqs,
        SPLITS=min(_PARTS // seqs, next_power_of_2(num_splits)),
        RANKS=min(_RANKS, max(16, next_power_of_2(rank))),
    )
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
    key=["NUM_HEADS", "RANK", "ROPE", "BLOCK_SIZE", "num_splits", "UNIT"],
)
@triton.jit(
    do_not_specialize=["num_splits", "num_filling", "stride_table"],
    do_not_specialize_on_alignment=["block_tables", "context_lens", "units", "seqs"],
)
def _attend_latent_split(
    absorbed,
    turning,
    cosines,
    sines,
    kv,
    block_tables,
    context_lens,
    partials,
    log_sums,
    units,
    seqs,
    stride_token,
    stride_head,
    stride_turning,
    stride_turning_head,
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
    UNIT: tl.constexpr,
    TOP_K: tl.constexpr,
    DEVICE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    query = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    context_len = tl.load(context_lens + query)
    seq, num_keys = sequence_of(query, context_len, seqs, UNIT, TOP_K)
    split_len = range_len(num_keys, num_splits, num_filling, KEYS)
    first = split * split_len
    end = tl.minimum(first + split_len, num_keys)

    heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = heads < NUM_HEADS
    tokens = tl.zeros((ROWS,), tl.int64) + query
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
        units + query * TOP_K,
        UNIT,
    )
    is_empty = sums == 0.0  # true if the range has no keys
    sums = tl.where(is_empty, 1.0, sums)
    result = accumulator / sums[:, None]
    ranks = tl.arange(0, BLOCK_RANK)
    parts = (query * NUM_HEADS + heads) * num_splits + split
    tl.store(
        partials + parts[:, None] * RANK + ranks[None, :],
        result.to(partials.dtype.element_ty),
        mask=is_row[:, None] & (ranks < RANK)[None, :],
    )
    if num_splits > 1:
        log_sum = tl.where(is_empty, float("-inf"), maxima + tl.log2(sums))
        tl.store(log_sums + parts, log_sum, mask=is_row)


@triton.jit(do_not_specialize=["num_seqs", "num_splits"])
def _project_splits(
    partials,
    log_sums,
    values,
    out,
    num_seqs,
    num_splits,
    stride_head,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    SEQS: tl.constexpr,
    SPLITS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Computes a tile of sequences of one head: the means of the ranges' results with the weights
    2^(log sum - largest log sum), some elements of the latents at a time, and their products."""
    ROWS: tl.constexpr = 16 if SEQS < 16 else SEQS  # fewest rows of a matrix product
    dtype: tl.constexpr = out.dtype.element_ty
    head = tl.program_id(1)
    seqs = tl.program_id(0) * SEQS + tl.arange(0, SEQS)
    rows = (seqs.to(tl.int64) * NUM_HEADS + head) * num_splits  # the first range of each sequence
    is_seq = seqs < num_seqs
    splits = tl.arange(0, SPLITS)
    largest = tl.full((SEQS,), float("-inf"), tl.float32)
    for first in range(0, num_splits, SPLITS):
        is_part = is_seq[:, None] & (first + splits < num_splits)[None, :]
        at = log_sums + rows[:, None] + (first + splits)[None, :]
        log_sum = tl.load(at, mask=is_part, other=float("-inf"))
        largest = tl.maximum(largest, tl.max(log_sum, 1))
    # If a sequence has no keys, all log sums are -inf. Subtracting 0 avoids NaN.
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    columns = tl.arange(0, BLOCK_VALUES)
    is_column = columns < NUM_VALUES
    sums = tl.zeros((ROWS, BLOCK_VALUES), tl.float32)
    for start in range(0, RANK, RANKS):
        ranks = start + tl.arange(0, RANKS)
        is_rank = ranks < RANK
        mean = tl.zeros((SEQS, RANKS), tl.float32)
        total = tl.zeros((SEQS,), tl.float32)
        for first in range(0, num_splits, SPLITS):
            is_part = is_seq[:, None] & (first + splits < num_splits)[None, :]
            parts = rows[:, None] + (first + splits)[None, :]
            log_sum = tl.load(log_sums + parts, mask=is_part, other=float("-inf"))
            weights = tl.exp2(log_sum - largest[:, None])
            total += tl.sum(weights, 1)
            # The result of an empty range is not written, and has the weight 0.
            is_element = (weights > 0.0)[:, :, None] & is_rank[None, None, :]
            at = partials + parts[:, :, None] * RANK + ranks[None, None, :]
            mean += tl.sum(tl.load(at, mask=is_element, other=0.0) * weights[:, :, None], 1)
        mean = (mean / tl.where(total == 0.0, 1.0, total)[:, None]).to(dtype)
        matrix = tl.load(
            values + head.to(tl.int64) * stride_head + columns[None, :] * RANK + ranks[:, None],
            mask=is_rank[:, None] & is_column[None, :],
            other=0.0,
        )
        sums += product(tl.broadcast_to(mean, (ROWS, RANKS)) if SEQS < 16 else mean, matrix)
    at = (tl.program_id(0) * SEQS + tl.arange(0, ROWS)).to(tl.int64)
    is_row = (tl.arange(0, ROWS) < SEQS) & (at < num_seqs)
    tl.store(
        out + (at * NUM_HEADS + head)[:, None] * NUM_VALUES + columns[None, :],
        sums.to(dtype),
        mask=is_row[:, None] & is_column[None, :],
    )

"""Prefill attention: causal attention for chunks of several sequences over paged KV, in one launch.

The algorithm is FlashAttention-2 (arXiv:2307.08691). Chunks of any length are concatenated. A
program computes a tile of ROWS rows for one sequence and one KV head. A row is a pair of a query
and one of the heads that share the KV head, so a short chunk can fill a tile. If G heads share a KV
head, row r of a sequence is query r // G and head r % G.

Each row of a tile attends to a different range of keys, because a query attends only to keys up to
its own position. A program processes the keys in two or three ranges. A mask is needed only in
ranges where some rows do not attend to a key:

                        range 1           range 2             range 3
    without a window    keys that all     other keys,
                        rows attend to    masked
    with a window       earlier keys,     keys that all       later keys,
                        masked            rows attend to      masked

The programs for sequence s begin with number (first row of s) // ROWS + s, and a program finds its
sequence by bisection. With this formula a sequence has enough programs, and at most one too many.
The surplus program returns immediately.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tandem_kernels.triton.attention_loop import LOG2_E, attend, start_state
from tandem_kernels.triton.kv_rows import check_scales
from tandem_kernels.triton.tuning import device_name, next_power_of_2, tuned

SMALL_TOKENS = 256  # the kernel is tuned separately for steps with at most this many tokens


def prefill_attention(
    queries: torch.Tensor,
    layer_kv: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_starts: torch.Tensor,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the attention output [T, heads, D], in the queries' dtype. The K and V of the chunks
    must already be in the pool.

    queries       [T, heads, D], bfloat16, float16 or float32; heads may be strided
    layer_kv      [num_blocks, KV heads, 2, block size, D]: `numbers` of KvPool.layer
    scales        [num_blocks, KV heads, 2, block size] float16: `scales` of KvPool.layer;
                  None: the pool is not quantized
    block_tables  [S, M] int32: the block ids of each of the S sequences
    context_lens  [S] int32: number of tokens of each sequence, including its chunk
    query_starts  [S + 1] int32: the chunk of sequence s is in the rows from query_starts[s] to
                  before query_starts[s + 1]; it may be empty; the last element is T
    window        number of keys to which a query attends, including its own; None: no limit
    scale         factor on q . k; None: 1 / sqrt(D)
    cap           scores become cap * tanh(score / cap); None: no cap
    sinks         [heads]: attention sinks; None: no sinks
    """
    num_tokens, num_heads, head_dim = queries.shape
    num_kv_heads, block_size = layer_kv.shape[1], layer_kv.shape[3]
    num_seqs = context_lens.shape[0]
    assert num_heads % num_kv_heads == 0
    assert queries.stride(1) == head_dim
    assert layer_kv.stride()[3:] == (head_dim, 1)
    check_scales(layer_kv, scales)
    group_size = num_heads // num_kv_heads
    out = queries.new_empty(num_tokens, num_heads, head_dim)

    def grid(config: dict[str, Any]) -> tuple[int, int]:
        return num_tokens * group_size // config["ROWS"] + num_seqs, num_kv_heads

    _attend_chunks[grid](
        queries,
        layer_kv,
        # Without scales the kernel does not read this argument, so any tensor can be passed.
        layer_kv if scales is None else scales,
        block_tables,
        context_lens,
        query_starts,
        out,
        queries if sinks is None else sinks,
        num_seqs,
        queries.stride(0),
        layer_kv.stride(0),
        layer_kv.stride(1),
        layer_kv.stride(2),
        block_tables.stride(0),
        (head_dim**-0.5 if scale is None else scale) * LOG2_E.value,
        2 if num_tokens <= SMALL_TOKENS else 3,
        GROUP_SIZE=group_size,
        HEAD_DIM=head_dim,
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        CAP=(cap or 0.0) * LOG2_E.value,
        HAS_SINKS=sinks is not None,
        DEVICE=device_name(queries.device),
    )
    return out


def _fits(config: triton.Config, arguments: Mapping[str, Any], arch: int) -> bool:
    """Returns whether the accumulators and scores of a tile fit into registers."""
    rows, keys = config.kwargs["ROWS"], config.kwargs["KEYS"]
    if config is _LARGE_HEADS and arguments["BLOCK_D"] <= 128:
        return False
    tiles = rows * (arguments["BLOCK_D"] + keys)
    return bool(tiles <= _tiles_per_warp_max(arch) * config.num_warps)


def _tiles_per_warp_max(arch: int) -> int:
    """Returns the largest number of elements of accumulators and scores per warp. With more,
    registers spill at most head sizes. The large products of Hopper (wgmma) and of Blackwell's data
    center cards (tcgen05) read inputs from shared memory, others from registers."""
    if 100 <= arch < 120:
        return 5120
    return 4608 if arch == 90 else 3072


# The only tile of 64 rows that fits into the shared memory of sm_120 with heads of 256. With
# smaller heads, other tiles are as good.
_LARGE_HEADS = triton.Config({"ROWS": 64, "KEYS": 32}, num_warps=8, num_stages=3)


@tuned(
    [
        triton.Config({"ROWS": rows, "KEYS": keys}, num_warps=num_warps, num_stages=num_stages)
        for rows, keys, num_warps, num_stages in (
            (64, 64, 4, 3),
            (64, 64, 4, 2),
            (64, 64, 8, 2),  # this and (128, 32, 8, 3): large heads
            (16, 64, 4, 3),
            (32, 64, 4, 3),
            (64, 32, 4, 5),
            (128, 32, 8, 3),
            (128, 64, 8, 3),
            (128, 64, 8, 5),
            (128, 128, 8, 2),
        )
    ]
    + [_LARGE_HEADS],
    key=["GROUP_SIZE", "HEAD_DIM", "BLOCK_SIZE", "WINDOW", "CAP", "HAS_SINKS", "size_class"],
    fits=_fits,
)
@triton.jit(
    do_not_specialize=["num_seqs", "size_class", "stride_table"],
    do_not_specialize_on_alignment=["block_tables", "context_lens", "query_starts"],
)
def _attend_chunks(
    queries,
    kv,
    kv_scales,
    block_tables,
    context_lens,
    query_starts,
    out,
    sinks,
    num_seqs,
    stride_query,
    stride_block,
    stride_head,
    stride_kv,
    stride_table,
    scale,
    size_class,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    DEVICE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq, start, num_queries, first_row = tile_of(program, query_starts, num_seqs, GROUP_SIZE, ROWS)
    if first_row < 0:
        return
    context_len = tl.load(context_lens + seq)

    rows = first_row + tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    row_queries = rows // GROUP_SIZE
    heads = kv_head * GROUP_SIZE + rows % GROUP_SIZE
    is_element = (row_queries < num_queries)[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (start + row_queries).to(tl.int64)
    q = tl.load(
        queries + tokens[:, None] * stride_query + heads[:, None] * HEAD_DIM + dims[None, :],
        mask=is_element,
        other=0.0,
    )
    prefix_len = context_len - num_queries
    last_keys = prefix_len + row_queries
    seen_by_all = (prefix_len + first_row // GROUP_SIZE + 1) // KEYS * KEYS
    last_query = tl.minimum((first_row + ROWS - 1) // GROUP_SIZE, num_queries - 1)
    end = prefix_len + last_query + 1
    head_kv = kv + kv_head.to(tl.int64) * stride_head
    head_scales = kv_scales + kv_head.to(tl.int64) * (stride_head // 2)
    block_table = block_tables + seq.to(tl.int64) * stride_table
    paged = (head_kv, head_scales, block_table, stride_block, stride_kv, scale)
    tile = (q, last_keys)
    state = start_state(ROWS, BLOCK_D)
    first = 0
    if WINDOW:
        seen_by_last = tl.cdiv(tl.maximum(end - WINDOW, 0), KEYS) * KEYS
        begin = tl.maximum(prefix_len + first_row // GROUP_SIZE + 1 - WINDOW, 0) // KEYS * KEYS
        first = tl.minimum(seen_by_last, seen_by_all)
        state = attend(
            state, tile, begin, first, paged, HEAD_DIM, BLOCK_D, BLOCK_SIZE, KEYS, WINDOW, CAP, True
        )
    state = attend(
        state,
        tile,
        first,
        seen_by_all,
        paged,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_SIZE,
        KEYS,
        WINDOW,
        CAP,
        False,
    )
    accumulator, sums, maxima = attend(
        state, tile, seen_by_all, end, paged, HEAD_DIM, BLOCK_D, BLOCK_SIZE, KEYS, WINDOW, CAP, True
    )
    if HAS_SINKS:
        sink = tl.load(sinks + heads).to(tl.float32) * LOG2_E
        sums += tl.exp2(sink - maxima)
    num_heads = GROUP_SIZE * tl.num_programs(1)
    places = (tokens[:, None] * num_heads + heads[:, None]) * HEAD_DIM + dims[None, :]
    result = accumulator / sums[:, None]
    tl.store(out + places, result.to(out.dtype.element_ty), mask=is_element)


@triton.jit
def tile_of(program, query_starts, num_seqs, GROUP_SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Returns the tile that a program computes: (index of the sequence, row of the sequence's first
    query, number of the sequence's queries, first row of the tile). A negative first row of the
    tile means that the program has no tile.
    """
    seq = _sequence_of(program, query_starts, num_seqs, GROUP_SIZE, ROWS)
    start = tl.load(query_starts + seq)
    num_queries = tl.load(query_starts + seq + 1) - start
    num_tiles = tl.cdiv(num_queries * GROUP_SIZE, ROWS)
    tile = program - (start * GROUP_SIZE // ROWS + seq)
    # Tiles with the longest contexts run first.
    return seq, start, num_queries, (num_tiles - 1 - tile) * ROWS


@triton.jit
def _sequence_of(program, query_starts, num_seqs, GROUP_SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Returns the sequence to which a program belongs: the last one whose programs do not begin
    after `program`."""
    low = 0
    high = num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_starts + middle) * GROUP_SIZE // ROWS + middle <= program:
            low = middle
        else:
            high = middle - 1
    return low

"""Decode attention: one query per sequence over paged KV.

A few sequences would leave most of a GPU idle, so each context is split into `num_splits` ranges of
keys (Dao et al., "Flash-Decoding for long-context inference", 2023). Two kernels run:

1. `_attend_split` has one program for each sequence, KV head and range. The program computes the
   attention of the heads that share the KV head to the keys of the range. It also returns the
   logarithm of the softmax sum of the range.
2. `_weigh_splits` has one program for each sequence and head, and for each 128 dimensions of the
   head. The program combines the results of the ranges: the weighted mean with the weights
   2^(log sum - largest log sum).

A CUDA graph records the number of ranges, but not the lengths of contexts. So a graph of many
sequences has enough ranges for a long context, and short contexts leave most of them empty: the
program of an empty range ends at once, and the second kernel reads nothing of the range.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tandem_kernels.triton.attention_loop import LOG2_E, attend, start_state
from tandem_kernels.triton.key_choice import ChosenKeys
from tandem_kernels.triton.kv_rows import check_scales
from tandem_kernels.triton.tuning import device_name, next_power_of_2, tuned

_PROGRAMS_PER_MULTIPROCESSOR = 4
_SPLITS_MAX = 64
# A range of the longest possible context has at most this many keys, so that the programs of one
# long sequence do not run long after those of the others have ended.
_RANGE_KEYS_MAX = 4096
# Contexts are cut into more ranges than fill the device only if a range has this many keys or more.
# The result of a range then takes less than 1% of the bytes of its keys and values.
_RANGE_KEYS_MIN = tl.constexpr(1024)
# Largest number of programs, relative to the number that fills the device. Most programs of a step
# with short contexts are empty, and each still has to be started.
_WAVES_MAX = 32
_JOINED_DIMS = 128  # dimensions of a program of `_weigh_splits`
# Largest number of elements of a key tile per warp; with twice as many, registers spill.
_TILE_PER_WARP_MAX = 4096


class Splits(NamedTuple):
    """How contexts are cut into ranges. A context of up to `num_filling` * 1,024 keys has
    `num_filling` ranges, a longer one has more, of at least 1,024 keys each, up to `num_splits`."""

    num_splits: int
    num_filling: int  # at most num_splits


def decode_attention(
    queries: torch.Tensor,
    layer_kv: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    splits: Splits,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    chosen: ChosenKeys | None = None,
) -> torch.Tensor:
    """Returns the attention output [B, heads, D], in the queries' dtype.

    queries       [B, heads, D], bfloat16, float16 or float32; heads may be strided
    layer_kv      [num_blocks, KV heads, 2, block size, D]: `numbers` of KvPool.layer
    scales        [num_blocks, KV heads, 2, block size] float16: `scales` of KvPool.layer;
                  None: the pool is not quantized
    block_tables  [B, M] int32: the block ids of each of the B sequences
    context_lens  [B] int32, including the query's own token; if 0, the output is zeros
    window        number of last keys to which the query attends; None: all
    scale         factor on q . k; None: 1 / sqrt(D)
    cap           scores become cap * tanh(score / cap); None: no cap
    sinks         [heads]: attention sinks; None: no sinks
    chosen        the keys to which each query attends, one list for each KV head. Its places give
                  `block_tables` and `context_lens`, and several queries may have one sequence.
                  None: all keys
    """
    num_seqs, num_heads, head_dim = queries.shape
    num_kv_heads, block_size = layer_kv.shape[1], layer_kv.shape[3]
    assert num_heads % num_kv_heads == 0
    assert queries.stride(1) == head_dim
    assert layer_kv.stride()[3:] == (head_dim, 1)
    group_size = num_heads // num_kv_heads
    out = queries.new_empty(num_seqs, num_heads, head_dim)
    num_splits = splits.num_splits
    if num_splits == 1:
        # With one split the kernel does not write `log_sums`, so any tensor can be passed.
        partials, log_sums = out.unsqueeze(2), out
    else:
        shape = (num_seqs, num_heads, num_splits)
        partials = queries.new_empty((*shape, head_dim), dtype=torch.float32)
        log_sums = queries.new_empty(shape, dtype=torch.float32)
    block_d = max(16, next_power_of_2(head_dim))
    check_scales(layer_kv, scales)
    assert chosen is None or chosen.units.shape[:2] == (num_seqs, num_kv_heads)
    _attend_split[(num_seqs, num_kv_heads, num_splits)](
        queries,
        layer_kv,
        layer_kv if scales is None else scales,
        block_tables,
        context_lens,
        partials,
        log_sums,
        # Without sinks the kernel does not read this argument, so any tensor can be passed.
        queries if sinks is None else sinks,
        *chosen_arguments(chosen, context_lens),
        queries.stride(0),
        layer_kv.stride(0),
        layer_kv.stride(1),
        layer_kv.stride(2),
        block_tables.stride(0),
        (head_dim**-0.5 if scale is None else scale) * LOG2_E.value,
        *splits,
        GROUP_SIZE=group_size,
        ROWS=max(16, next_power_of_2(group_size)),
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        CAP=(cap or 0.0) * LOG2_E.value,
        HAS_SINKS=sinks is not None and num_splits == 1,
        **chosen_constants(chosen),
        DEVICE=device_name(queries.device),
    )
    if num_splits > 1:
        join_splits(partials, log_sums, out, sinks)
    return out


def chosen_arguments(
    chosen: ChosenKeys | None, unread: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the arguments `units` and `seqs` of the kernels. Without chosen keys these are
    `unread`, because the kernels do not read them."""
    return (unread, unread) if chosen is None else (chosen.units, chosen.places.seqs)


def chosen_constants(chosen: ChosenKeys | None) -> dict[str, int]:
    """Returns the constants UNIT and TOP_K of the kernels, which are 0 without chosen keys."""
    if chosen is None:
        return {"UNIT": 0, "TOP_K": 0}
    assert chosen.units.is_contiguous()
    return {"UNIT": chosen.unit_size, "TOP_K": chosen.units.shape[2]}


def join_splits(
    partials: torch.Tensor,
    log_sums: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """Combines the results of the ranges, `partials` [B, heads, splits, D], into `out` [B, heads,
    D].

    log_sums    [B, heads, splits]: logarithm of the softmax sum, in base 2; -inf: an empty range,
                whose result is not read
    """
    num_seqs, num_heads, num_splits, head_dim = partials.shape
    block_d = min(_JOINED_DIMS, max(16, next_power_of_2(head_dim)))
    _weigh_splits[(num_seqs, num_heads, triton.cdiv(head_dim, block_d))](
        partials,
        log_sums,
        out,
        out if sinks is None else sinks,  # without sinks, the kernel does not read this argument
        num_splits,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        SPLITS=next_power_of_2(num_splits),
        HAS_SINKS=sinks is not None,
    )


def choose_splits(
    num_seqs: int,
    num_kv_heads: int,
    context_len_max: int,
    num_multiprocessors: int,
    programs: int = _PROGRAMS_PER_MULTIPROCESSOR,
) -> Splits:
    """Returns how to cut contexts so that about `programs` programs for each multiprocessor run at
    any time. Both numbers of ranges are powers of 2.

    If the sequences alone have fewer programs than that, contexts of any length are cut. If they
    have enough, only long contexts are cut: otherwise the last programs, or those of the longest
    context, would leave most multiprocessors idle.

    A CUDA graph records these numbers, so they must not depend on the actual context lengths of a
    step, only on the largest possible one.
    """
    num_full = programs * num_multiprocessors
    num_heads = num_seqs * num_kv_heads
    useful = min(_SPLITS_MAX, max(1, context_len_max // 64))
    num_filling = _power_of_2_below(min(useful, num_full // num_heads))
    long = triton.cdiv(context_len_max, _RANGE_KEYS_MAX)
    allowed = min(useful, _WAVES_MAX * num_full // num_heads)
    wanted = min(next_power_of_2(long), _power_of_2_below(allowed))
    return Splits(max(num_filling, wanted), num_filling)


def _power_of_2_below(n: int) -> int:
    """Returns the largest power of 2 up to n; 1 if n is less than 1."""
    return 1 << (max(1, n).bit_length() - 1)


def _fits(config: triton.Config, arguments: Mapping[str, Any], arch: int) -> bool:
    """Returns whether a tile of keys fits into registers with this config."""
    tile = config.kwargs["KEYS"] * arguments["BLOCK_D"]
    return bool(tile <= _TILE_PER_WARP_MAX * config.num_warps)


@tuned(
    [
        triton.Config({"KEYS": keys}, num_warps=num_warps, num_stages=num_stages)
        for keys, num_warps, num_stages in (
            (64, 4, 3),
            (32, 2, 3),
            (32, 4, 5),
            (64, 4, 2),
            (64, 4, 5),
            (128, 4, 3),
            (128, 8, 5),
        )
    ],
    key=[
        *("GROUP_SIZE", "HEAD_DIM", "BLOCK_SIZE", "WINDOW", "CAP", "HAS_SINKS", "num_splits"),
        "UNIT",
    ],
    fits=_fits,
)
@triton.jit(
    do_not_specialize=["num_splits", "num_filling", "stride_table"],
    do_not_specialize_on_alignment=["block_tables", "context_lens", "units", "seqs"],
)
def _attend_split(
    queries,
    kv,
    kv_scales,
    block_tables,
    context_lens,
    partials,
    log_sums,
    sinks,
    units,
    seqs,
    stride_query,
    stride_block,
    stride_head,
    stride_kv,
    stride_table,
    scale,
    num_splits,
    num_filling,
    GROUP_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    UNIT: tl.constexpr,
    TOP_K: tl.constexpr,
    DEVICE: tl.constexpr,
    KEYS: tl.constexpr,
):
    query = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_heads = GROUP_SIZE * tl.num_programs(1)
    context_len = tl.load(context_lens + query)
    seq, num_keys = sequence_of(query, context_len, seqs, UNIT, TOP_K)
    start = tl.maximum(num_keys - WINDOW, 0) // KEYS * KEYS if WINDOW else 0
    split_len = range_len(num_keys - start, num_splits, num_filling, KEYS)
    first = start + split * split_len
    end = tl.minimum(first + split_len, num_keys)

    rows = tl.arange(0, ROWS)
    heads = kv_head * GROUP_SIZE + rows
    parts = (query * num_heads + heads) * num_splits + split
    if (first >= end) & (num_splits > 1):
        tl.store(log_sums + parts, float("-inf"), mask=rows < GROUP_SIZE)
        return
    dims = tl.arange(0, BLOCK_D)
    is_element = (rows < GROUP_SIZE)[:, None] & (dims < HEAD_DIM)[None, :]
    places = heads[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(queries + query * stride_query + places, mask=is_element, other=0.0)
    last_keys = tl.zeros((ROWS,), tl.int32) + context_len - 1
    head_kv = kv + kv_head.to(tl.int64) * stride_head
    head_scales = kv_scales + kv_head.to(tl.int64) * (stride_head // 2)
    block_table = block_tables + seq * stride_table
    paged = (head_kv, head_scales, block_table, stride_block, stride_kv, scale)
    state = start_state(ROWS, BLOCK_D)
    accumulator, sums, maxima = attend(
        state,
        (q, last_keys),
        first,
        end,
        paged,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_SIZE,
        KEYS,
        WINDOW,
        CAP,
        True,
        units + (query * tl.num_programs(1) + kv_head) * TOP_K,
        UNIT,
    )
    is_empty = sums == 0.0  # true if the range has no keys
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=rows < GROUP_SIZE, other=0.0).to(tl.float32) * LOG2_E
        sums += tl.where(is_empty, 0.0, tl.exp2(sink - maxima))
    sums = tl.where(is_empty, 1.0, sums)
    result = accumulator / sums[:, None]
    tl.store(
        partials + parts[:, None] * HEAD_DIM + dims[None, :],
        result.to(partials.dtype.element_ty),
        mask=is_element,
    )
    if num_splits > 1:
        tl.store(log_sums + parts, maxima + tl.log2(sums), mask=rows < GROUP_SIZE)


@triton.jit
def sequence_of(query, context_len, seqs, UNIT: tl.constexpr, TOP_K: tl.constexpr):
    """Returns the row of a query's sequence in the block tables, and the number of keys to which it
    attends; the last unit may have fewer."""
    seq, num_keys = query, context_len
    if UNIT:
        seq = tl.load(seqs + query).to(tl.int64)
        num_keys = tl.minimum(tl.cdiv(context_len, UNIT), TOP_K) * UNIT
    return seq, num_keys


@triton.jit
def range_len(num_keys, num_splits, num_filling, KEYS: tl.constexpr):
    """Returns the number of keys of a range of a context with `num_keys` keys, a multiple of
    KEYS. See `Splits`."""
    least = tl.minimum(tl.cdiv(num_keys, num_filling), _RANGE_KEYS_MIN)
    return tl.cdiv(tl.maximum(tl.cdiv(num_keys, num_splits), least), KEYS) * KEYS


@triton.jit(do_not_specialize=["num_splits"])
def _weigh_splits(
    partials,
    log_sums,
    out,
    sinks,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    splits = tl.arange(0, SPLITS)
    dims = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_split = splits < num_splits
    log_sum = tl.load(log_sums + row * num_splits + splits, mask=is_split, other=float("-inf"))
    largest = tl.max(log_sum, 0)
    # If the sequence has no keys, all log sums are -inf. Subtracting 0 avoids NaN.
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2(log_sum - largest)
    total = tl.sum(weights, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + tl.program_id(1)).to(tl.float32) * LOG2_E
        total += tl.where(total == 0.0, 0.0, tl.exp2(sink - largest))
    weights = weights / tl.where(total == 0.0, 1.0, total)
    places = (row * num_splits + splits)[:, None] * HEAD_DIM + dims[None, :]
    has_keys = log_sum > float("-inf")
    is_element = has_keys[:, None] & (dims < HEAD_DIM)[None, :]
    parts = tl.load(partials + places, mask=is_element, other=0.0)
    result = tl.sum(parts * weights[:, None], 0)
    tl.store(out + row * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)

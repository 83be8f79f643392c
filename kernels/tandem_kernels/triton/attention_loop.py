"""The inner loop of decode and prefill attention: computes the attention of a tile of rows to a
range of paged keys, KEYS keys per iteration.

A row is a pair of a query and a head. All rows of a tile have the same KV head, so K and V are read
once for all of them. The loop uses online softmax (arXiv:2205.14135): each row has a running
maximum and sum of its scores, in base 2, and an accumulator that is rescaled when the maximum
grows.

    tensor of an iteration    shape
    queries                   [ROWS, BLOCK_D]
    keys                      [BLOCK_D, KEYS]; their blocks are found with the block table

BLOCK_D is HEAD_DIM, padded with zeros to a power of 2 that is at least 16.
"""

import triton
import triton.language as tl

from tandem_kernels.triton.kv_rows import has_scales, read, unit
from tandem_kernels.triton.tuning import is_interpreted

LOG2_E = tl.constexpr(1.4426950408889634)
_INTERPRETED = tl.constexpr(is_interpreted())


@triton.jit
def attend(
    state,
    tile,
    first,
    end,
    paged,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    MASKED: tl.constexpr,
    units=None,
    UNIT: tl.constexpr = 0,
):
    """Continues the online softmax of a tile of rows with the keys from `first` to `end` - 1.
    `state` and the result are (accumulator, sums, maxima).

    tile      (queries, last_keys): a row attends to the keys up to its entry in `last_keys`
    paged     (address of the head's K in block 0, address of the scales of this K, block table of
              the sequence, stride of a block, stride from K to V, scale of scores in base 2)
    WINDOW    not 0: a row attends only to the last WINDOW of its keys
    CAP       not 0: scores become CAP * tanh(score / CAP); scores and CAP are in base 2
    MASKED    false: every row attends to all keys of the range, and their number is a multiple of
              KEYS, so no mask is needed
    units, UNIT    UNIT not 0: the keys of the range are those of the chosen units, UNIT keys each
              (key_choice.py). `units` lists them, and all rows are of one query. Only with MASKED

    Without a window or units, each row must attend to a key in the first iteration, because a
    maximum of -inf gives NaN. In a quantized pool, the scale of a key is applied to the key's
    score, and the scale of a value to the value's softmax weight.
    """
    accumulator, sums, maxima = state
    queries, last_keys = tile
    kv, kv_scales, block_table, stride_block, stride_kv, scale = paged
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    if WINDOW:
        first_last_key = tl.min(last_keys, 0)
    for start in range(first, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        if MASKED:
            is_key = keys < end
            if UNIT:
                keys, is_key = chosen_keys(units, keys, is_key, last_keys, UNIT)
            if WINDOW:
                is_key &= keys > first_last_key - WINDOW
            blocks = tl.load(block_table + keys // BLOCK_SIZE, mask=is_key, other=0)
        else:
            blocks = tl.load(block_table + keys // BLOCK_SIZE)
        tokens = kv + blocks.to(tl.int64) * stride_block + (keys % BLOCK_SIZE) * HEAD_DIM
        k_at = tokens[None, :] + dims[:, None]
        v_at = tokens[:, None] + dims[None, :] + stride_kv
        if MASKED:
            k = tl.load(k_at, mask=is_dim[:, None] & is_key[None, :], other=0.0)
            v = tl.load(v_at, mask=is_key[:, None] & is_dim[None, :], other=0.0)
        elif BLOCK_D == HEAD_DIM:
            k = tl.load(k_at)
            v = tl.load(v_at)
        else:
            k = tl.load(k_at, mask=is_dim[:, None], other=0.0)
            v = tl.load(v_at, mask=is_dim[None, :], other=0.0)
        scores = product(queries, read(k, queries.dtype))
        if has_scales(kv.dtype):
            k_scales_at = kv_scales + blocks.to(tl.int64) * (stride_block // 2) + keys % BLOCK_SIZE
            v_scales_at = k_scales_at + BLOCK_SIZE
            if MASKED:
                k_scales = tl.load(k_scales_at, mask=is_key, other=0.0)
                v_scales = tl.load(v_scales_at, mask=is_key, other=0.0)
            else:
                k_scales = tl.load(k_scales_at)
                v_scales = tl.load(v_scales_at)
            scores = scores * (k_scales.to(tl.float32) * unit(kv.dtype))[None, :]
        if CAP > 0.0:  # computes tanh(x) as 2 sigmoid(2 x) - 1
            scores = 2.0 * CAP * tl.sigmoid(scores * (scale * 2.0 / CAP)) - CAP
        if MASKED:
            is_seen = (keys[None, :] <= last_keys[:, None]) & is_key[None, :]
            if WINDOW:
                is_seen &= keys[None, :] > last_keys[:, None] - WINDOW
            scores = tl.where(is_seen, scores, float("-inf"))
        weights, accumulator, sums, maxima = weigh(
            scores, 1.0 if CAP > 0.0 else scale, accumulator, sums, maxima, WINDOW + UNIT
        )
        if has_scales(kv.dtype):
            weights = weights * (v_scales.to(tl.float32) * unit(kv.dtype))[None, :]
        accumulator += product(weights.to(queries.dtype), read(v, queries.dtype))
    return accumulator, sums, maxima


@triton.jit
def chosen_keys(units, keys, is_key, last_keys, UNIT: tl.constexpr):
    """Returns the positions of keys of the chosen units, and which of them the query may see. The
    last unit may have keys after the query, which may be any numbers."""
    positions = tl.load(units + keys // UNIT, mask=is_key, other=0) * UNIT + keys % UNIT
    return positions, is_key & (positions <= tl.max(last_keys, 0))


@triton.jit
def weigh(scores, scale, accumulator, sums, maxima, MAY_BE_EMPTY: tl.constexpr):
    """Computes the softmax weights of one iteration's scores. Returns the weights, the rescaled
    accumulator, and the sums and maxima updated with these scores. MAY_BE_EMPTY is not 0 if a row
    may attend to no key of the first iteration."""
    new_maxima = tl.maximum(maxima, tl.max(scores, 1) * scale)
    base = new_maxima
    if MAY_BE_EMPTY:  # avoids NaN if a row has not attended to any key yet
        base = tl.where(base == float("-inf"), 0.0, base)
    weights = tl.exp2(scores * scale - base[:, None])  # rounds once, as a fused multiply-add
    shrink = tl.exp2(maxima - base)
    return weights, accumulator * shrink[:, None], sums * shrink + tl.sum(weights, 1), new_maxima


@triton.jit
def start_state(ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Returns the state before the first key: (accumulator, sums, maxima)."""
    return (
        tl.zeros((ROWS, BLOCK_D), tl.float32),
        tl.zeros((ROWS,), tl.float32),
        tl.full((ROWS,), float("-inf"), tl.float32),
    )


@triton.jit
def product(a, b):
    """Multiplies matrices with fp32 sums. In the interpreter, the inputs are first converted to
    fp32, because the interpreter would multiply the bits of bfloat16 as integers."""
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, input_precision="ieee")

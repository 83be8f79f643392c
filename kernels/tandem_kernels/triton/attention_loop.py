"""The inner loop of both attentions: a tile of query rows over a range of keys in paged KV.

Online softmax (arXiv:2205.14135): a running maximum and sum for each row, in base 2, and an
accumulator that is rescaled when the maximum grows. Rows are (query, head of the KV head's group)
pairs, so that a group shares each read of K and V.

    queries  [ROWS, BLOCK_D]     BLOCK_D: HEAD_DIM, padded with zeros to a power of 2 from 16
    keys     [BLOCK_D, KEYS]     gathered by the block table, KEYS of them a turn
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
):
    """Returns (accumulator, sums, maxima) after the keys `first` to `end` of one KV head.

    `tile` is (queries, last_keys). A row sees the keys up to its last one, of these the last WINDOW
    if that is not 0. Not MASKED: every row sees all of them, and they are whole turns. Without a
    window the first turn of all has to hold a key that each row sees: there, a maximum of -inf
    would make NaN. No key before the first row's window is read.

    `paged` is (the head's K in block 0, the scales of its K in block 0, the sequence's block table,
    the strides of a block and from K to V, the scale in base 2). Of a quantized pool a key's scale
    is applied to its score, and a value's to its weight. CAP, in base 2 too: scores become
    CAP tanh(score / CAP); 0: no.
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
        if CAP > 0.0:  # tanh(x) is 2 sigmoid(2 x) - 1
            scores = 2.0 * CAP * tl.sigmoid(scores * (scale * 2.0 / CAP)) - CAP
        if MASKED:
            is_seen = (keys[None, :] <= last_keys[:, None]) & is_key[None, :]
            if WINDOW:
                is_seen &= keys[None, :] > last_keys[:, None] - WINDOW
            scores = tl.where(is_seen, scores, float("-inf"))
        weights, accumulator, sums, maxima = weigh(
            scores, 1.0 if CAP > 0.0 else scale, accumulator, sums, maxima, WINDOW
        )
        if has_scales(kv.dtype):
            weights = weights * (v_scales.to(tl.float32) * unit(kv.dtype))[None, :]
        accumulator += product(weights.to(queries.dtype), read(v, queries.dtype))
    return accumulator, sums, maxima


@triton.jit
def weigh(scores, scale, accumulator, sums, maxima, WINDOW: tl.constexpr):
    """Returns the weights of a turn's scores, and the state to add their values to: rescaled, and
    with the turn in its sums and maxima."""
    new_maxima = tl.maximum(maxima, tl.max(scores, 1) * scale)
    base = new_maxima
    if WINDOW:  # a row that has seen nothing yet
        base = tl.where(base == float("-inf"), 0.0, base)
    weights = tl.exp2(scores * scale - base[:, None])  # one rounding: a fused operation
    shrink = tl.exp2(maxima - base)
    return weights, accumulator * shrink[:, None], sums * shrink + tl.sum(weights, 1), new_maxima


@triton.jit
def start_state(ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Returns the state of rows that have seen nothing."""
    return (
        tl.zeros((ROWS, BLOCK_D), tl.float32),
        tl.zeros((ROWS,), tl.float32),
        tl.full((ROWS,), float("-inf"), tl.float32),
    )


@triton.jit
def product(a, b):
    """Multiplies in fp32. The interpreter would multiply the bits of bfloat16 as integers."""
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, input_precision="ieee")

"""The inner loop of latent attention: computes the attention of a tile of rows to a range of a
sequence's latents. A row is a pair of a query and a head.

All heads share one row of the pool per token: the token's latent and one rotated key. The latent is
also the token's value (arXiv:2405.04434). An iteration reads the pool's rows of KEYS tokens once
and uses the latents twice: with the queries for scores, and with the softmax weights for the
output.

    tensor    shape                 content
    absorbed  [ROWS, BLOCK_RANK]    W_k^T q of (query, head) pairs
    rotated   [ROWS, BLOCK_ROPE]    the rotated elements of the same queries, which a program
                                    rotates when it loads them
    latents   [KEYS, BLOCK_RANK]    the latents of KEYS tokens
    turned    [BLOCK_ROPE, KEYS]    the rotated keys of these tokens

BLOCK_RANK and BLOCK_ROPE are RANK and ROPE, padded to a power of 2. RoPE (arXiv:2104.09864) rotates
element i with element i + rope / 2, as in rope.py.
"""

from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl

from tandem_kernels.triton.attention_loop import chosen_keys, product, weigh
from tandem_kernels.triton.kv_rows import read


class LatentQueries(NamedTuple):
    """Queries in two parts. The score of a query and a token is
    absorbed . latent + rotate(turning) . (rotated key)."""

    absorbed: torch.Tensor  # [T, heads, rank]; tokens and heads may be strided
    turning: torch.Tensor  # [T, heads, rope], before the rotation; tokens and heads may be strided
    cosines: torch.Tensor  # of rope.rotary_angles, contiguous, [T, 1, rope / 2] fp32
    sines: torch.Tensor

    def rows(self, first: int, end: int) -> Self:
        """Returns the queries of the tokens from `first` to before `end`."""
        return type(self)(*(part[first:end] for part in self))

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of tokens and heads of `absorbed` and of `turning`."""
        return (*self.absorbed.stride()[:2], *self.turning.stride()[:2])


def check_latents(queries: LatentQueries, layer_kv: torch.Tensor) -> None:
    """Asserts that queries and KV have the layout that the kernels expect."""
    absorbed, turning, cosines, sines = queries
    assert absorbed.shape[:2] == turning.shape[:2]
    assert absorbed.stride(2) == turning.stride(2) == 1
    assert cosines.is_contiguous()
    assert sines.is_contiguous()
    assert cosines.shape == sines.shape == (len(turning), 1, turning.shape[2] // 2)
    width = absorbed.shape[2] + turning.shape[2]
    assert (*layer_kv.shape[1:3], layer_kv.shape[4]) == (1, 1, width)
    assert layer_kv.stride()[3:] == (width, 1)


@triton.jit
def load_queries(
    queries,
    strides,
    tokens,
    heads,
    is_row,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
):
    """Loads both parts of the queries for rows given by `tokens` and `heads`, and rotates the
    second. `queries` are the tensors of LatentQueries, and `strides` its strides."""
    absorbed, turning, cosines, sines = queries
    stride_token, stride_head, stride_turning, stride_turning_head = strides
    HALF: tl.constexpr = ROPE // 2
    heads = heads.to(tl.int64)
    ranks = tl.arange(0, BLOCK_RANK)
    at = tokens * stride_token + heads * stride_head
    q_latent = tl.load(
        absorbed + at[:, None] + ranks[None, :],
        mask=is_row[:, None] & (ranks < RANK)[None, :],
        other=0.0,
    )
    turns = tl.arange(0, BLOCK_ROPE)
    is_turn = is_row[:, None] & (turns < ROPE)[None, :]
    angles = (tokens * HALF)[:, None] + (turns % HALF)[None, :]
    cos = tl.load(cosines + angles, mask=is_turn, other=0.0)
    sin = tl.load(sines + angles, mask=is_turn, other=0.0)
    row = turning + (tokens * stride_turning + heads * stride_turning_head)[:, None]
    own = tl.load(row + turns[None, :], mask=is_turn, other=0.0).to(tl.float32)
    other = tl.load(row + ((turns + HALF) % ROPE)[None, :], mask=is_turn, other=0.0).to(tl.float32)
    other = tl.where((turns < HALF)[None, :], -other, other)
    return q_latent, (own * cos + other * sin).to(turning.dtype.element_ty)


@triton.jit
def attend_latents(
    state,
    tile,
    first,
    end,
    paged,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    units=None,
    UNIT: tl.constexpr = 0,
):
    """Continues the online softmax of a tile of rows with the tokens from `first` to `end` - 1.
    `state` and the result are (accumulator, sums, maxima).

    tile      (absorbed, rotated, last_keys): a row attends to the tokens up to its entry in
              `last_keys`
    paged     (address of the layer in block 0, block table of the sequence, stride of a block,
              scale of scores in base 2)
    MASKED    false: every row attends to all tokens of the range, and their number is a multiple of
              KEYS, so no mask is needed
    units, UNIT    as for `attend` of attention_loop.py

    Without units, each row must attend to a token in the first iteration, because a maximum of -inf
    gives NaN.
    """
    accumulator, sums, maxima = state
    absorbed, rotated, last_keys = tile
    kv, block_table, stride_block, scale = paged
    ranks = tl.arange(0, BLOCK_RANK)
    turns = tl.arange(0, BLOCK_ROPE)
    is_rank = ranks < RANK
    is_turn = turns < ROPE
    for start in range(first, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        if MASKED:
            is_key = keys < end
            if UNIT:
                keys, is_key = chosen_keys(units, keys, is_key, last_keys, UNIT)
            blocks = tl.load(block_table + keys // BLOCK_SIZE, mask=is_key, other=0)
        else:
            blocks = tl.load(block_table + keys // BLOCK_SIZE)
        tokens = kv + blocks.to(tl.int64) * stride_block + (keys % BLOCK_SIZE) * (RANK + ROPE)
        latents_at = tokens[:, None] + ranks[None, :]
        turned_at = tokens[None, :] + RANK + turns[:, None]
        if MASKED:
            latents = tl.load(latents_at, mask=is_key[:, None] & is_rank[None, :], other=0.0)
            turned = tl.load(turned_at, mask=is_turn[:, None] & is_key[None, :], other=0.0)
        else:
            latents = tl.load(latents_at, mask=is_rank[None, :], other=0.0)
            turned = tl.load(turned_at, mask=is_turn[:, None], other=0.0)
        latents = read(latents, absorbed.dtype)
        scores = product(absorbed, tl.trans(latents))
        scores = (scores + product(rotated, read(turned, rotated.dtype))) * scale
        if MASKED:
            is_seen = (keys[None, :] <= last_keys[:, None]) & is_key[None, :]
            scores = tl.where(is_seen, scores, float("-inf"))
        weights, accumulator, sums, maxima = weigh(scores, 1.0, accumulator, sums, maxima, UNIT)
        accumulator += product(weights.to(absorbed.dtype), latents)
    return accumulator, sums, maxima

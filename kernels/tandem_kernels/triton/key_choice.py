"""The choice of keys in sparse attention (see tandem_kernels/key_choice.py), for all queries of a
step.

A *unit* is a key, or a block of keys that are chosen together. Three kernels run:

1. `_index_heads` norms and rotates the indexer's queries and keys, and stores the keys in the pool.
2. `_score_keys` or `_score_blocks` computes the scores of units, a program for each query and range
   of units. The heads of the query are the rows of its products.
3. `_choose` lists the units with the highest scores, a program for each list. It finds the lowest
   score of a chosen unit without a sort: the bits of a score, as an integer that grows with the
   score, are found 8 at a time, from a histogram of the scores that agree in the bits before.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tandem_kernels.triton.attention_loop import product
from tandem_kernels.triton.kv_rows import read
from tandem_kernels.triton.norm import normalized
from tandem_kernels.triton.rope_cache import Angles
from tandem_kernels.triton.tuning import next_power_of_2

_RANGE_KEYS = 1024  # keys that a program scores, at least one block of them
_KEYS = 64  # keys of an iteration, if each key is a unit
_TILE = 2048  # scores of an iteration of `_choose`
NUM_WARPS = 8
# Largest number of scores that are kept at once, 256 MiB. More queries are chosen for in turn.
_SCORES_MAX = 1 << 26


class QueryPlaces(NamedTuple):
    """Where the context of each query of a step is. With padding, a query may have no context."""

    block_tables: torch.Tensor  # [S, M] int32: block ids of each sequence
    seqs: torch.Tensor  # [T] int32: row of the query's sequence in `block_tables`
    lens: torch.Tensor  # [T] int32: number of tokens up to and including the query

    def rows(self, first: int, end: int) -> "QueryPlaces":
        """Returns the places of the queries from `first` to before `end`."""
        return QueryPlaces(self.block_tables, self.seqs[first:end], self.lens[first:end])


class ChosenKeys(NamedTuple):
    """The keys to which each query of a step attends."""

    # [T, lists, K] int32: numbers of the chosen units, ascending. There is one list, or one for
    # each KV head. If the context has fewer units than K, the rest of a list is undefined.
    units: torch.Tensor
    unit_size: int  # number of keys of a unit
    places: QueryPlaces

    @property
    def num_keys_max(self) -> int:
        """Largest number of keys to which a query attends."""
        return self.units.shape[2] * self.unit_size


def index_heads(
    queries: torch.Tensor,
    keys: torch.Tensor,
    angles: Angles,
    slots: torch.Tensor,
    pool: torch.Tensor,
    *,
    rope_dim: int,
    key_norm: torch.Tensor,
    key_bias: torch.Tensor | None,
    key_eps: float,
    query_norm: torch.Tensor | None = None,
    query_eps: float = 0.0,
) -> torch.Tensor:
    """Stores the indexer's keys of the step's tokens in the pool. Returns its queries, [T, heads,
    dim], in the dtype of `queries`. Keys, and queries with `query_norm`, are normed; then the first
    `rope_dim` elements are rotated.

    queries   [T, heads * dim]
    keys      [T, dim]
    angles    cosines and sines of rope.rotary_angles, each [T, 1, at least rope_dim / 2] fp32
    slots     [T] int32 or int64: block id * block size + offset; negative: the token is not stored
    pool      [num_blocks, block size, dim]: KvPool.index_keys of the layer
    key_norm, key_bias    [dim]: weights of LayerNorm, or without bias of RMSNorm, of keys
    query_norm    [dim]: weights of RMSNorm of each query; None: queries have no norm
    """
    num_tokens, dim = keys.shape
    num_heads = queries.shape[1] // dim
    assert queries.stride(1) == keys.stride(1) == pool.stride(2) == 1
    assert pool.stride(1) == dim
    cosines, sines = (angle.contiguous() for angle in angles)
    out = queries.new_empty(num_tokens, num_heads, dim)
    _index_heads[(num_tokens, num_heads + 1)](
        queries,
        keys,
        cosines,
        sines,
        slots,
        out,
        pool,
        query_norm,
        key_norm,
        key_bias,
        query_eps,
        key_eps,
        queries.stride(0),
        keys.stride(0),
        cosines.shape[-1],
        pool.stride(0),
        NUM_HEADS=num_heads,
        DIM=dim,
        BLOCK_DIM=next_power_of_2(dim),
        ROPE=rope_dim,
        BLOCK_SIZE=pool.shape[1],
        HAS_QUERY_NORM=query_norm is not None,
        HAS_BIAS=key_bias is not None,
    )
    return out


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _index_heads(
    queries,
    keys,
    cosines,
    sines,
    slots,
    out,
    pool,
    query_norm,
    key_norm,
    key_bias,
    query_eps,
    key_eps,
    stride_query,
    stride_key,
    stride_angle,
    stride_block,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_QUERY_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, BLOCK_DIM)
    of_angles = (cosines + token * stride_angle, sines + token * stride_angle)
    if head < NUM_HEADS:
        row = queries + token * stride_query + head * DIM
        turned = _rotated(
            row,
            query_norm,
            query_norm,
            query_eps,
            of_angles,
            dims,
            DIM,
            ROPE,
            1 if HAS_QUERY_NORM else 0,
        )
        tl.store(out + (token * NUM_HEADS + head) * DIM + dims, turned, mask=dims < DIM)
    else:
        row = keys + token * stride_key
        turned = _rotated(
            row,
            key_norm,
            key_bias,
            key_eps,
            of_angles,
            dims,
            DIM,
            ROPE,
            2 if HAS_BIAS else 1,
        )
        slot = tl.load(slots + token).to(tl.int64)
        at = pool + slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * DIM + dims
        mask = dims < tl.where(slot < 0, 0, DIM)
        tl.store(at, turned.to(pool.dtype.element_ty), mask=mask)


@triton.jit
def _rotated(
    row,
    weight,
    bias,
    eps,
    of_angles,
    dims,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    NORM: tl.constexpr,
):
    """Returns a row of DIM elements after its norm and the rotation of its first elements, in the
    row's dtype. NORM is 0 for no norm, 1 for RMSNorm and 2 for LayerNorm."""
    HALF: tl.constexpr = ROPE // 2
    dtype: tl.constexpr = row.dtype.element_ty
    # Element i is rotated with element `others` of i; those after the first ROPE stay.
    others = tl.where(dims < HALF, dims + HALF, tl.where(dims < ROPE, dims - HALF, dims))
    is_dim, is_turned = dims < DIM, dims < ROPE
    own = tl.load(row + dims, mask=is_dim, other=0.0).to(tl.float32)
    other = tl.load(row + others, mask=is_dim, other=0.0).to(tl.float32)
    if NORM == 1:
        # The sum of squares is that of the whole row: `others` only changes the order.
        own = normalized(own, weight, eps, dims, is_dim, DIM, dtype).to(dtype).to(tl.float32)
        other = normalized(other, weight, eps, others, is_dim, DIM, dtype).to(dtype).to(tl.float32)
    if NORM == 2:
        mean = tl.sum(own, 0) / DIM
        centered = tl.where(is_dim, own - mean, 0.0)
        factor = tl.rsqrt(tl.sum(centered * centered, 0) / DIM + eps)
        own = _layer_normed(centered * factor, weight, bias, dims, is_dim, dtype)
        other = _layer_normed((other - mean) * factor, weight, bias, others, is_dim, dtype)
    cos = tl.load(of_angles[0] + dims % HALF, mask=is_turned, other=1.0)
    sin = tl.load(of_angles[1] + dims % HALF, mask=is_turned, other=0.0)
    other = tl.where(dims < HALF, -other, other)
    return tl.where(is_turned, own * cos + other * sin, own).to(dtype)


@triton.jit
def _layer_normed(x, weight, bias, columns, is_column, dtype: tl.constexpr):
    weights = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    biases = tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)
    return (x * weights + biases).to(dtype).to(tl.float32)


def choose_keys(
    queries: torch.Tensor,
    shares: torch.Tensor | None,
    pool: torch.Tensor,
    places: QueryPlaces,
    top_k: int,
    *,
    block_size: int | None,
    num_local: int,
    context_len_max: int,
) -> ChosenKeys:
    """Chooses the keys of the step's queries, as the methods of tandem_kernels.key_choice.KeyChoice
    do. The indexer's keys of the step's tokens must already be in the pool.

    queries     [T, heads, dim], contiguous
    shares      [T, heads] fp32: weights of the heads, if tokens are chosen
    pool        [num_blocks, block size, dim]: KvPool.index_keys of the layer
    block_size, num_local    number of keys of a block, and of blocks that are always chosen; None:
                tokens are chosen
    context_len_max    maximum of `places.lens`
    """
    num_tokens, num_heads, _ = queries.shape
    unit_size = block_size or 1
    num_units = triton.cdiv(context_len_max, unit_size)
    num_lists = num_heads if block_size else 1
    # A power of 2, because the kernels are compiled for each number.
    top_k = min(top_k, next_power_of_2(num_units))
    units = torch.empty(num_tokens, num_lists, top_k, dtype=torch.int32, device=queries.device)
    step = max(1, _SCORES_MAX // (num_lists * num_units))
    for first in range(0, num_tokens, step):
        end = min(first + step, num_tokens)
        some = places.rows(first, end)
        scores = torch.empty(
            end - first, num_lists, num_units, dtype=torch.float32, device=queries.device
        )
        own = queries[first:end]
        if block_size is None:
            assert shares is not None
            _score_tokens(scores, own, shares[first:end], pool, some)
        else:
            _score_each_block(scores, own, pool, some, block_size, num_local)
        _choose[((end - first) * num_lists,)](
            units[first:end],
            scores,
            some.lens,
            num_units,
            TOP_K=top_k,
            NUM_LISTS=num_lists,
            UNIT=unit_size,
            TILE=min(_TILE, max(16, next_power_of_2(num_units))),
            num_warps=NUM_WARPS,
        )
    return ChosenKeys(units, unit_size, places)


def _score_tokens(
    scores: torch.Tensor,
    queries: torch.Tensor,
    shares: torch.Tensor,
    pool: torch.Tensor,
    places: QueryPlaces,
) -> None:
    assert shares.is_contiguous()
    assert shares.dtype == torch.float32
    num_tokens, num_heads, dim = queries.shape
    num_keys = scores.shape[-1]
    _score_keys[(num_tokens, triton.cdiv(num_keys, _RANGE_KEYS))](
        scores,
        queries,
        shares,
        pool,
        *places,
        pool.stride(0),
        places.block_tables.stride(0),
        num_keys,
        NUM_HEADS=num_heads,
        HEADS=max(16, next_power_of_2(num_heads)),
        DIM=dim,
        BLOCK_DIM=max(16, next_power_of_2(dim)),
        BLOCK_SIZE=pool.shape[1],
        KEYS=_KEYS,
        RANGE=_RANGE_KEYS,
    )


def _score_each_block(
    scores: torch.Tensor,
    queries: torch.Tensor,
    pool: torch.Tensor,
    places: QueryPlaces,
    block_size: int,
    num_local: int,
) -> None:
    num_tokens, num_heads, dim = queries.shape
    num_blocks = scores.shape[-1]
    of_program = max(1, _RANGE_KEYS // block_size)
    _score_blocks[(num_tokens, triton.cdiv(num_blocks, of_program))](
        scores,
        queries,
        pool,
        *places,
        pool.stride(0),
        places.block_tables.stride(0),
        num_blocks,
        NUM_HEADS=num_heads,
        HEADS=max(16, next_power_of_2(num_heads)),
        DIM=dim,
        BLOCK_DIM=max(16, next_power_of_2(dim)),
        BLOCK_SIZE=pool.shape[1],
        KEYS=max(16, next_power_of_2(block_size)),
        UNIT=block_size,
        NUM_LOCAL=num_local,
        RANGE=of_program,
    )


@triton.jit
def _products(
    query,
    keys,
    is_key,
    pool,
    block_table,
    stride_block,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Returns the products of a query's heads and some keys, fp32 [heads, keys]."""
    dims = tl.arange(0, BLOCK_DIM)
    blocks = tl.load(block_table + keys // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
    at = pool + blocks * stride_block + keys % BLOCK_SIZE * DIM
    key = tl.load(
        at[None, :] + dims[:, None], mask=(dims < DIM)[:, None] & is_key[None, :], other=0.0
    )
    return product(query, read(key, query.dtype))


@triton.jit
def _query_of(
    queries,
    token,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Loads the heads of a query, [HEADS, BLOCK_DIM]."""
    heads, dims = tl.arange(0, HEADS), tl.arange(0, BLOCK_DIM)
    return tl.load(
        queries + (token * NUM_HEADS + heads)[:, None] * DIM + dims[None, :],
        mask=(heads < NUM_HEADS)[:, None] & (dims < DIM)[None, :],
        other=0.0,
    )


@triton.jit(
    do_not_specialize=["num_keys", "stride_table"],
    do_not_specialize_on_alignment=["queries", "shares", "block_tables", "seqs", "lens"],
)
def _score_keys(
    scores,
    queries,
    shares,
    pool,
    block_tables,
    seqs,
    lens,
    stride_block,
    stride_table,
    num_keys,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    RANGE: tl.constexpr,
):
    """Computes the scores of a range of keys: the sum of a query's heads, with their weights."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * RANGE
    num = tl.load(lens + token)
    if first >= num:
        return
    query = _query_of(queries, token, NUM_HEADS, HEADS, DIM, BLOCK_DIM)
    heads = tl.arange(0, HEADS)
    share = tl.load(shares + token * NUM_HEADS + heads, mask=heads < NUM_HEADS, other=0.0)
    block_table = block_tables + tl.load(seqs + token).to(tl.int64) * stride_table
    for start in range(first, tl.minimum(first + RANGE, num), KEYS):
        keys = start + tl.arange(0, KEYS)
        products = _products(
            query, keys, keys < num, pool, block_table, stride_block, DIM, BLOCK_DIM, BLOCK_SIZE
        )
        sums = tl.sum(tl.maximum(products, 0.0) * share[:, None], 0)
        tl.store(scores + token * num_keys + keys, sums, mask=keys < num)


@triton.jit(
    do_not_specialize=["num_blocks", "stride_table"],
    do_not_specialize_on_alignment=["queries", "block_tables", "seqs", "lens"],
)
def _score_blocks(
    scores,
    queries,
    pool,
    block_tables,
    seqs,
    lens,
    stride_block,
    stride_table,
    num_blocks,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    UNIT: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    RANGE: tl.constexpr,
):
    """Computes, for each head of a query, the scores of a range of blocks of UNIT keys: the highest
    score of a key. The last NUM_LOCAL blocks get infinity."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * RANGE
    num = tl.load(lens + token)
    if first * UNIT >= num:
        return
    query = _query_of(queries, token, NUM_HEADS, HEADS, DIM, BLOCK_DIM)
    heads = tl.arange(0, HEADS)
    block_table = block_tables + tl.load(seqs + token).to(tl.int64) * stride_table
    own = (num - 1) // UNIT  # the block of the query
    for block in range(first, tl.minimum(first + RANGE, own + 1)):
        in_block = tl.arange(0, KEYS)
        keys = block * UNIT + in_block
        is_key = (in_block < UNIT) & (keys < num)
        products = _products(
            query, keys, is_key, pool, block_table, stride_block, DIM, BLOCK_DIM, BLOCK_SIZE
        )
        highest = tl.max(tl.where(is_key[None, :], products, float("-inf")), 1)
        highest = tl.where(own - block < NUM_LOCAL, float("inf"), highest)
        at = scores + (token * NUM_HEADS + heads) * num_blocks + block
        tl.store(at, highest, mask=heads < NUM_HEADS)


@triton.jit
def _ordered(scores, at, is_unit):
    """Loads scores as integers from 0 to 2^32 - 1 in the same order. 0 and -0 are equal."""
    score = tl.load(scores + at, mask=is_unit, other=0.0)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    # The integers of negative numbers fall as the numbers grow.
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return bits.to(tl.int64) + 2147483648


@triton.jit(
    do_not_specialize=["num_units"],
    do_not_specialize_on_alignment=["units", "lens"],
)
def _choose(
    units,
    scores,
    lens,
    num_units,
    TOP_K: tl.constexpr,
    NUM_LISTS: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Lists the TOP_K units with the highest scores of a context; all if it has no more. Of units
    with equal scores, those at lower positions are listed."""
    row = tl.program_id(0).to(tl.int64)
    num = tl.cdiv(tl.load(lens + row // NUM_LISTS), UNIT)
    units += row * TOP_K
    scores += row * num_units
    tile = tl.arange(0, TILE)
    if num <= TOP_K:
        for start in range(0, num, TILE):
            tl.store(units + start + tile, start + tile, mask=start + tile < num)
        return
    # The first bits of the integer of the lowest chosen score, and how many units to choose among
    # those whose integers begin with these bits.
    lowest = tl.zeros((), tl.int64)
    missing = tl.full((), TOP_K, tl.int32)
    bins = tl.arange(0, 256)
    for digit in tl.static_range(4):
        counts = tl.zeros((256,), tl.int32)
        for start in range(0, num, TILE):
            is_unit = start + tile < num
            number = _ordered(scores, start + tile, is_unit) >> (24 - 8 * digit)
            is_unit &= (number >> 8) == lowest
            counts += tl.histogram((number & 255).to(tl.int32), 256, mask=is_unit)
        at_least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        found = tl.max(tl.where(at_least >= missing, bins, 0), 0)
        missing -= tl.sum(tl.where(bins > found, counts, 0), 0)
        lowest = lowest * 256 + found
    num_listed = tl.zeros((), tl.int32)
    for start in range(0, num, TILE):
        is_unit = start + tile < num
        number = _ordered(scores, start + tile, is_unit)
        is_equal = (is_unit & (number == lowest)).to(tl.int32)
        is_chosen = is_unit & (number > lowest)
        is_chosen |= (is_equal > 0) & (tl.cumsum(is_equal, 0) <= missing)
        chosen = is_chosen.to(tl.int32)
        at = num_listed + tl.cumsum(chosen, 0) - 1
        tl.store(units + at, start + tile, mask=is_chosen)
        num_listed += tl.sum(chosen, 0)
        missing -= tl.minimum(missing, tl.sum(is_equal, 0))

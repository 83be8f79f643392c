"""Both paged attentions against softmax(QK^T)V written out, sequence by sequence."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tandem_kernels.attention import PagedAttention
from tandem_kernels.attention_groups import QuerySpan, batch_order, make_groups
from tandem_kernels.attention_invariant import InvariantPagedAttention
from tandem_kernels.kv_cache import KvPool
from tests.kv_pools import pool_of

LAYERS, LAYER, KV_HEADS, HEAD_DIM, NUM_BLOCKS = 2, 1, 2, 16, 64
ATTENTIONS = [PagedAttention, InvariantPagedAttention]
Shape = tuple[int, int]  # (queries, context length)


def make_pool(block_size: int, dtype: torch.dtype = torch.float32) -> KvPool:
    shape = (NUM_BLOCKS, KV_HEADS, LAYERS, 2, block_size, HEAD_DIM)
    return pool_of(torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype))


def make_spans(shapes: Sequence[Shape], block_size: int) -> list[QuerySpan]:
    free = list(range(NUM_BLOCKS))
    random.Random(2).shuffle(free)
    spans, first_row = [], 0
    for num_queries, context_len in shapes:
        table = [free.pop() for _ in range(-(-context_len // block_size))]
        spans.append(QuerySpan(first_row, num_queries, context_len, table))
        first_row += num_queries
    return spans


def plain_attention(
    queries: torch.Tensor,
    spans: list[QuerySpan],
    pool: KvPool,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes attention in fp64, one query at a time; sinks are keys without values."""
    out = torch.empty(queries.shape, dtype=torch.double)
    for span in spans:
        table = torch.tensor([list(span.block_table)])
        kv = pool.gather(LAYER, pool.block_rows(table), 1)[:, 0].double()
        kv = kv.repeat_interleave(queries.shape[1] // KV_HEADS, dim=1)
        for i in range(span.num_queries):
            seen = span.context_len - span.num_queries + i + 1
            num_first, num_last = (0, window) if window else span.visible or (0, seen)
            keys = [j for j in range(seen) if j < num_first or j >= seen - num_last]
            row = span.first_row + i
            query = queries[row].double().unsqueeze(-1)
            scores = (kv[0, :, keys] @ query) / HEAD_DIM**0.5
            if sinks is not None:
                scores = torch.cat((scores, sinks.double().view(-1, 1, 1)), 1)
            weights = torch.softmax(scores, dim=1)[:, : kv[1, :, keys].shape[1]]
            out[row] = (kv[1, :, keys] * weights).sum(1)
    return out


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("block_size", [1, 16, 24])
@pytest.mark.parametrize("group_size", [1, 3, 20])
@pytest.mark.parametrize(
    "shapes",
    [
        [(1, 1)],
        [(1, 9), (1, 20), (1, 20)],
        [(20, 20)],  # a whole prompt
        [(7, 33)],  # a chunk after a prefix
        [(1, 3), (1, 12), (5, 5), (4, 17)],
    ],
)
def test_equals_attention_written_out(
    attention: type[PagedAttention], block_size: int, group_size: int, shapes: list[Shape]
) -> None:
    pool = make_pool(block_size)
    spans = make_spans(shapes, block_size)
    queries = torch.randn(sum(n for n, _ in shapes), KV_HEADS * group_size, HEAD_DIM)
    result = attention(spans, pool, queries.shape[1], torch.float32)(LAYER, queries)
    expected = plain_attention(queries, spans, pool)
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)


def test_longer_contexts_than_a_key_tile() -> None:
    pool = make_pool(16)
    spans = make_spans([(1, 64), (1, 65), (1, 200), (70, 130), (130, 130)], 16)
    queries = torch.randn(203, KV_HEADS * 3, HEAD_DIM)
    expected = plain_attention(queries, spans, pool)
    for attention in ATTENTIONS:
        result = attention(spans, pool, KV_HEADS * 3, torch.float32)(LAYER, queries)
        torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("block_size", [1, 16, 24])
@pytest.mark.parametrize("window", [1, 16, 40, 64, 100, 1000])
def test_a_window(attention: type[PagedAttention], block_size: int, window: int) -> None:
    """Blocks that lie before every query's window may be anybody's, or no blocks any more."""
    num_blocks = 512 // block_size
    kv = torch.randn(num_blocks, KV_HEADS, LAYERS, 2, block_size, HEAD_DIM)
    shapes = [(1, 3), (1, 41), (1, 128), (1, 129), (5, 5), (130, 130), (7, 60), (70, 150)]
    spans, first_row = [], 0
    for num_queries, context_len in shapes:
        length = -(-context_len // block_size)
        table = random.Random(context_len).sample(range(num_blocks), length)
        spans.append(QuerySpan(first_row, num_queries, context_len, table))
        first_row += num_queries
    pool = pool_of(kv)
    queries = torch.randn(first_row, KV_HEADS * 3, HEAD_DIM)
    expected = plain_attention(queries, spans, pool, window)
    for i, span in enumerate(spans):
        first_key = max(0, span.context_len - span.num_queries + 1 - window)
        passed = first_key // block_size
        table = [-1] * passed + list(span.block_table[passed:])
        spans[i] = QuerySpan(span.first_row, span.num_queries, span.context_len, table)
    result = attention(spans, pool, queries.shape[1], torch.float32, window)(LAYER, queries)
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("visible", [(0, 1), (4, 40), (70, 64), (1000, 1)])
def test_first_and_last_keys(
    attention: type[PagedAttention], visible: tuple[int, int], window: int | None
) -> None:
    """Every second sequence sees all keys. A layer's own window counts instead."""
    spans = make_spans([(1, 3), (1, 41), (1, 129), (1, 129), (5, 5), (130, 130), (70, 150)], 16)
    spans = [replace(span, visible=visible if i % 2 else None) for i, span in enumerate(spans)]
    pool = make_pool(16)
    queries = torch.randn(209, KV_HEADS * 3, HEAD_DIM)
    expected = plain_attention(queries, spans, pool, window)
    for i, span in enumerate(spans):
        if window is None and span.visible:
            first_key = max(0, span.context_len - span.num_queries + 1 - visible[1])
            passed = slice(-(-visible[0] // 16), first_key // 16)
            table = list(span.block_table)
            table[passed] = [-1] * len(table[passed])
            spans[i] = replace(span, block_table=table)
    result = attention(spans, pool, queries.shape[1], torch.float32, window)(LAYER, queries)
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("group_size", [1, 3, 20])
@pytest.mark.parametrize("window", [None, 40])
def test_sinks(attention: type[PagedAttention], group_size: int, window: int | None) -> None:
    pool = make_pool(16)
    spans = make_spans([(1, 3), (1, 80), (20, 20), (70, 150)], 16)
    queries = torch.randn(92, KV_HEADS * group_size, HEAD_DIM)
    sinks = torch.linspace(-5, 5, queries.shape[1])
    attend = attention(spans, pool, queries.shape[1], torch.float32, window)
    expected = plain_attention(queries, spans, pool, window, sinks)
    result = attend(LAYER, queries, sinks).double()
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_keys_may_be_of_another_dtype_than_queries() -> None:
    pool = make_pool(16, torch.bfloat16)
    spans = make_spans([(1, 30), (12, 40)], 16)
    queries = torch.randn(13, KV_HEADS, HEAD_DIM)
    result = PagedAttention(spans, pool, KV_HEADS, torch.float32)(LAYER, queries)
    expected = plain_attention(queries, spans, pool)
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)


def test_padding_rows_are_left_out() -> None:
    pool = make_pool(16)
    spans = make_spans([(1, 30), (12, 40)], 16)
    queries = torch.randn(16, KV_HEADS, HEAD_DIM)
    result = InvariantPagedAttention(spans, pool, KV_HEADS, torch.float32)(LAYER, queries)
    assert not result[13:].any()


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("group_size", [1, 3, 8, 20])
def test_a_querys_bits_do_not_depend_on_chunks_batch_or_block_size(
    group_size: int, window: int | None
) -> None:
    """One context of 150 tokens: as one chunk, in parts, as decodes side by side."""
    context_len, num_heads = 150, KV_HEADS * group_size
    queries = torch.randn(context_len, num_heads, HEAD_DIM)
    kv = torch.randn(2, context_len, KV_HEADS, HEAD_DIM)

    def attend(block_size: int, cuts: Sequence[int]) -> torch.Tensor:
        pool = make_pool(block_size)
        table = random.Random(block_size).sample(range(NUM_BLOCKS), -(-context_len // block_size))
        positions = torch.arange(context_len)
        slots = torch.tensor(table)[positions // block_size], positions % block_size
        pool.write(LAYER, pool.token_rows(*slots), kv[0], kv[1])
        edges = [0, *cuts, context_len]
        spans = [QuerySpan(first, end - first, end, table) for first, end in pairwise(edges)]
        attention = InvariantPagedAttention(spans, pool, num_heads, torch.float32, window)
        return attention(LAYER, queries)

    whole = attend(16, [])
    assert torch.equal(attend(16, [1, 2, 3, 67]), whole)
    assert torch.equal(attend(64, [5, 64, 128]), whole)
    assert torch.equal(attend(3, range(1, context_len)), whole)


class TestGroups:
    def test_order_puts_decodes_first_and_like_lengths_together(self) -> None:
        order = batch_order(context_lens=[700, 90, 30, 2000, 50], num_queries=[1, 1, 30, 1, 7])
        assert order == [1, 0, 3, 2, 4]

    def test_decodes_of_like_length_share_a_group_and_chunks_stand_alone(self) -> None:
        pool = make_pool(16)
        lens = [5, 200, 256, 512, 513, 1020, 1030]
        spans = [QuerySpan(i, 1, n, list(range(NUM_BLOCKS)) * 2) for i, n in enumerate(lens)]
        spans += [QuerySpan(7, 5, 5, [0]), QuerySpan(12, 2, 9, [1])]
        groups = make_groups(spans, pool)
        assert [g.context_lens for g in groups] == [
            (5, 200, 256, 512),
            (513, 1020),
            (1030,),
            (5,),
            (9,),
        ]
        assert [(g.first_row, g.num_rows) for g in groups] == [
            (0, 4),
            (4, 2),
            (6, 1),
            (7, 5),
            (12, 2),
        ]

    def test_a_group_gathers_a_bounded_number_of_tokens(self) -> None:
        pool = make_pool(16)
        spans = [QuerySpan(i, 1, 1000, list(range(63))) for i in range(40)]
        groups = make_groups(spans, pool)
        assert [g.num_seqs for g in groups] == [16, 16, 8]

    def test_tokens_before_a_window_count_if_the_layer_has_entries_for_them(self) -> None:
        pool = make_pool(16)
        spans = [QuerySpan(i, 1, 1000, list(range(63))) for i in range(40)]
        assert [g.num_seqs for g in make_groups(spans, pool, window=16)] == [40]
        spans = [replace(span, counted_len=1000) for span in spans]
        assert [g.num_seqs for g in make_groups(spans, pool, window=16)] == [16, 16, 8]

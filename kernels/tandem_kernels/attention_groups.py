"""Divides a step's sequences into groups. Attention is computed for all sequences of a group by one
call, after their KV was copied into one tensor.

A sequence with several queries is a group by itself. Sequences with one query each can share a
group. Their contexts are padded to the longest one, so a group has only contexts of similar length,
and at most `_GATHERED_TOKENS_MAX` tokens with padding.

With a window of w tokens, the query at position i attends to the keys i - w < j <= i. Blocks before
the window of a sequence's first query are not copied. Positions in the sequence are then counted
from the first copied block. With chunks of c tokens, the query at position i attends to the keys
i - i % c <= j <= i. Then, and for a sequence with a KV budget, whose queries attend to the first
and the last keys of the context, all blocks are copied, for simplicity.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

import torch

from tandem_kernels.block_sums import BlockShares
from tandem_kernels.kv_cache import KvPool

_GATHERED_TOKENS_MAX = 16384
_SMALL_CONTEXT_TOKENS = 256  # For shorter contexts, padding costs less than another group.


@dataclass(frozen=True, slots=True)
class QuerySpan:
    """The tokens that a step computes for one sequence: the last `num_queries` tokens of the
    context, in consecutive rows of the step."""

    first_row: int
    num_queries: int
    context_len: int  # number of tokens of the sequence, including the queries
    # The block ids of the context. More ids may follow. The ids of blocks to which no query attends
    # are not used.
    block_table: Sequence[int]
    # (a, b) under a KV budget: in layers without a window, a query attends to the first a and the
    # last b keys of its context. None: a query attends to all keys.
    visible: tuple[int, int] | None = None
    shares: BlockShares | None = None  # adds up the softmax weights per block; None: not needed
    # Number of tokens by which the memory of a group is bounded. None: those to which the layer
    # attends. A layer with `Entries` has some for the whole context, although it has a window.
    counted_len: int | None = None


class Entries(NamedTuple):
    """Further keys, to which the queries of a group attend beside those of its context. They are
    their values, too."""

    keys: torch.Tensor  # [B, E, D]
    hidden: torch.Tensor  # bool [B, num_queries, E]: true where a query does not attend to a key


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """B sequences with one query each, or one sequence with several queries."""

    first_row: int
    num_queries: int
    context_lens: tuple[int, ...]  # [B]
    visible: tuple[tuple[int, int] | None, ...]  # [B]: `visible` of each span
    block_tables: torch.Tensor  # [B, M]: block ids, padded to the longest context
    block_rows: torch.Tensor  # result of KvPool.block_rows for the group's block tables
    shares: tuple[BlockShares | None, ...]  # [B]: `shares` of each span

    @property
    def num_seqs(self) -> int:
        return len(self.context_lens)

    @property
    def num_rows(self) -> int:
        return self.num_seqs * self.num_queries

    def hidden(
        self,
        keys: torch.Tensor,
        ends: torch.Tensor,
        window: int | None,
        chunk: int | None,
        repeats: int = 1,
    ) -> torch.Tensor:
        """Returns a boolean mask that is true where a query does not attend to a key.

        `keys` has the positions of keys. `ends` [B * repeats, ...] has, for each query, the
        position after the last key to which the query attends; its first dimension has `repeats`
        rows per sequence. In a layer with a window or with chunks, only these count, and `visible`
        is ignored. With chunks, positions must be counted from the start of the sequence.
        """
        hidden = keys >= ends
        if window is not None:
            hidden |= keys < ends - window
        elif chunk is not None:
            hidden |= keys < (ends - 1) // chunk * chunk
        elif any(self.visible):
            # Without a KV budget, the first `max(context_lens)` keys are visible: all keys.
            every = (max(self.context_lens), 0)
            shown = torch.tensor([each or every for each in self.visible], device=keys.device)
            shown = shown.repeat_interleave(repeats, 0).view(-1, 2, *[1] * (ends.ndim - 1))
            hidden |= (keys >= shown[:, 0]) & (keys < ends - shown[:, 1])
        return hidden

    def sees_all(self, window: int | None, chunk: int | None) -> bool:
        """Returns whether each query attends to all keys up to the query's own position."""
        longest = max(self.context_lens)
        limit = chunk if window is None else window
        if limit is not None:
            return longest <= limit
        return all(each is None or longest <= sum(each) for each in self.visible)


def batch_order(context_lens: Sequence[int], num_queries: Sequence[int]) -> list[int]:
    """Returns the order in which the sequences of a step must be, so that the rows of each group
    are consecutive."""
    return sorted(range(len(context_lens)), key=lambda i: (num_queries[i] > 1, context_lens[i]))


def make_groups(
    spans: Sequence[QuerySpan], pool: KvPool, padded_to: int = 1, window: int | None = None
) -> list[AttentionGroup]:
    """Divides spans, which must be in the order of `batch_order`, into groups.

    Contexts are padded to a multiple of `padded_to` tokens and of the block size. The number of
    tokens that are left out before a window is a multiple of both as well.
    """
    if window is not None:
        spans = [_within(span, window, pool.block_size, padded_to) for span in spans]
    return [_group(part, pool, padded_to) for part in _split(spans)]


def _within(span: QuerySpan, window: int, block_size: int, padded_to: int) -> QuerySpan:
    """Returns the span without the blocks before the window of its first query."""
    first_key = max(0, span.context_len - span.num_queries + 1 - window)
    num_blocks = first_key // lcm(block_size, padded_to) * lcm(block_size, padded_to) // block_size
    return QuerySpan(
        span.first_row,
        span.num_queries,
        span.context_len - num_blocks * block_size,
        span.block_table[num_blocks:],
        counted_len=span.counted_len,
    )  # In a layer with a window, `visible` is not used.


def _split(spans: Sequence[QuerySpan]) -> Iterator[list[QuerySpan]]:
    part: list[QuerySpan] = []
    for span in spans:
        if part and not _fits(part, span):
            yield part
            part = []
        part.append(span)
    if part:
        yield part


def _fits(part: list[QuerySpan], span: QuerySpan) -> bool:
    if span.num_queries > 1 or part[0].num_queries > 1:
        return False
    shortest = max(_counted(part[0]), _SMALL_CONTEXT_TOKENS)
    gathered = (len(part) + 1) * _counted(span)
    return _counted(span) <= 2 * shortest and gathered <= _GATHERED_TOKENS_MAX


def _counted(span: QuerySpan) -> int:
    return span.context_len if span.counted_len is None else span.counted_len


def _group(part: list[QuerySpan], pool: KvPool, padded_to: int) -> AttentionGroup:
    padded_len = -(-max(s.context_len for s in part) // padded_to) * padded_to
    num_blocks = -(-padded_len // pool.block_size)
    tables = torch.zeros(len(part), num_blocks, dtype=torch.long)
    for row, span in zip(tables, part, strict=True):
        used = -(-span.context_len // pool.block_size)
        # A negative id marks a block that was released because it is outside the window. The mask
        # hides its keys, so any block can be read instead, such as block 0.
        row[:used] = torch.tensor(span.block_table[:used]).clamp_(min=0)
    tables = tables.to(pool.device)
    return AttentionGroup(
        first_row=part[0].first_row,
        num_queries=part[0].num_queries,
        context_lens=tuple(s.context_len for s in part),
        visible=tuple(s.visible for s in part),
        block_tables=tables,
        block_rows=pool.block_rows(tables),
        shares=tuple(s.shares for s in part),
    )

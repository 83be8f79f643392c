"""Groups a step's sequences for attention and locates their KV, once per step.

Sequences with one query each are gathered side by side, padded to the longest context of the group.
A group therefore contains only contexts of similar length, and at most `_GATHERED_TOKENS_MAX`
padded tokens. A sequence with several queries is a group by itself.

With a sliding window of w tokens, the query at position i attends to the keys i - w < j <= i. Only
the blocks of a context that the group's queries attend to are gathered. The blocks before them are
removed from the span, and the span's context length then counts from the first gathered block. If
only the first and the last keys of a context are visible, the whole context is gathered, for
simplicity.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm

import torch

from tandem_kernels.block_sums import BlockShares
from tandem_kernels.kv_cache import KvPool

_GATHERED_TOKENS_MAX = 16384
_SMALL_CONTEXT_TOKENS = 256  # For shorter contexts, padding costs less than another group.


@dataclass(frozen=True, slots=True)
class QuerySpan:
    """A sequence's query rows in the step: the last `num_queries` tokens of its context."""

    first_row: int
    num_queries: int
    context_len: int  # tokens
    # The block ids of the context; the table may be longer. Ids of blocks that no query attends to
    # are ignored.
    block_table: Sequence[int]
    # The numbers of first keys and of last keys that a query attends to, in layers without a
    # window. None: a query attends to all keys.
    visible: tuple[int, int] | None = None
    shares: BlockShares | None = None  # collects the sequence's softmax weights per block, if set


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """B sequences with `num_queries` consecutive query rows each. If `num_queries` is not 1, B is
    1."""

    first_row: int
    num_queries: int
    context_lens: tuple[int, ...]  # [B]
    visible: tuple[tuple[int, int] | None, ...]  # [B]: `visible` of each span
    block_rows: torch.Tensor  # see KvPool.block_rows
    shares: tuple[BlockShares | None, ...]  # [B]: `shares` of each span

    @property
    def num_seqs(self) -> int:
        return len(self.context_lens)

    @property
    def num_rows(self) -> int:
        return self.num_seqs * self.num_queries

    def hidden(
        self, keys: torch.Tensor, ends: torch.Tensor, window: int | None, repeats: int = 1
    ) -> torch.Tensor:
        """Returns a boolean mask that is true where a query does not attend to a key.

        `keys` are key positions. `ends` [B * repeats, ...] has, for each query, the position after
        the last key that it attends to. If the layer has a sliding `window`, the window replaces
        `visible` of the spans.
        """
        hidden = keys >= ends
        if window is not None:
            hidden |= keys < ends - window
        elif any(self.visible):
            # the value for sequences in which all keys are visible
            every = (max(self.context_lens), 0)
            shown = torch.tensor([each or every for each in self.visible], device=keys.device)
            shown = shown.repeat_interleave(repeats, 0).view(-1, 2, *[1] * (ends.ndim - 1))
            hidden |= (keys >= shown[:, 0]) & (keys < ends - shown[:, 1])
        return hidden

    def sees_all(self, window: int | None) -> bool:
        """Returns whether each query attends to all keys up to its own position."""
        longest = max(self.context_lens)
        if window is not None:
            return longest <= window
        return all(each is None or longest <= sum(each) for each in self.visible)


def batch_order(context_lens: Sequence[int], num_queries: Sequence[int]) -> list[int]:
    """Returns the order of sequences in a step for which each group is contiguous."""
    return sorted(range(len(context_lens)), key=lambda i: (num_queries[i] > 1, context_lens[i]))


def make_groups(
    spans: Sequence[QuerySpan], pool: KvPool, padded_to: int = 1, window: int | None = None
) -> list[AttentionGroup]:
    """Splits `spans`, which must be in `batch_order`, into groups of consecutive spans.

    Contexts are padded to a multiple of `padded_to` tokens and of the block size. The number of
    tokens removed before a window is a multiple of both.
    """
    if window is not None:
        spans = [_within(span, window, pool.block_size, padded_to) for span in spans]
    return [_group(part, pool, padded_to) for part in _split(spans)]


def _within(span: QuerySpan, window: int, block_size: int, padded_to: int) -> QuerySpan:
    """Removes the blocks that precede the window of the span's first query."""
    first_key = max(0, span.context_len - span.num_queries + 1 - window)
    num_blocks = first_key // lcm(block_size, padded_to) * lcm(block_size, padded_to) // block_size
    return QuerySpan(
        span.first_row,
        span.num_queries,
        span.context_len - num_blocks * block_size,
        span.block_table[num_blocks:],
    )  # `visible` is left out, because the window replaces it.


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
    shortest = max(part[0].context_len, _SMALL_CONTEXT_TOKENS)
    gathered = (len(part) + 1) * span.context_len
    return span.context_len <= 2 * shortest and gathered <= _GATHERED_TOKENS_MAX


def _group(part: list[QuerySpan], pool: KvPool, padded_to: int) -> AttentionGroup:
    padded_len = -(-max(s.context_len for s in part) // padded_to) * padded_to
    num_blocks = -(-padded_len // pool.block_size)
    tables = torch.zeros(len(part), num_blocks, dtype=torch.long)
    for row, span in zip(tables, part, strict=True):
        used = -(-span.context_len // pool.block_size)
        # A negative id stands for a block outside the window. The mask hides it, so block 0 may
        # take its place.
        row[:used] = torch.tensor(span.block_table[:used]).clamp_(min=0)
    return AttentionGroup(
        first_row=part[0].first_row,
        num_queries=part[0].num_queries,
        context_lens=tuple(s.context_len for s in part),
        visible=tuple(s.visible for s in part),
        block_rows=pool.block_rows(tables.to(pool.device)),
        shares=tuple(s.shares for s in part),
    )

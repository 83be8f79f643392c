"""Causal grouped-query attention over paged KV, with torch.

    out[t, h] = softmax(q[t, h] . K[h / G] / sqrt(D)) V[h / G]     for token t and head h

G heads share the keys K and values V of a KV head. Token t attends to the keys up to position t, or
to the last w of these keys in a layer with a window of w tokens. A head may have an attention sink:
a learned score that takes part in the softmax but adds nothing to the output.

For each layer, the KV of several blocks is copied into one contiguous tensor and passed to torch's
scaled_dot_product_attention. There is one call for each group of decoding sequences and one for
each prefill chunk. Scores and sums are fp32 for every dtype.

The last bits of a sequence's result may depend on the other sequences of the batch.
attention_invariant.py computes results that do not depend on them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention, softmax

from tandem_kernels.attention_groups import AttentionGroup, Entries, QuerySpan, make_groups
from tandem_kernels.key_choice import Choice
from tandem_kernels.kv_cache import KvPool

# (queries, keys, values, mask, sinks) -> output in the shape of the queries
_Product = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    torch.Tensor,
]


@dataclass(frozen=True, slots=True)
class _MaskedGroup:
    group: AttentionGroup
    # A mask that is added to the scores. None: all tokens of the context are queries, so torch's
    # causal masking is enough.
    mask: torch.Tensor | None


class PagedAttention:
    """Computes the attention of one step. Index tensors and masks are created once and used in
    every layer."""

    def __init__(
        self,
        spans: Sequence[QuerySpan],
        pool: KvPool,
        num_heads: int,
        dtype: torch.dtype,
        window: int | None = None,
        scale: float | None = None,
        cap: float | None = None,
        chunk: int | None = None,
    ) -> None:
        """Scores are multiplied by `scale`; None: 1 / sqrt(D). With `cap`, scores then become
        cap * tanh(score / cap). With `chunk`, queries attend within chunks of so many tokens."""
        assert num_heads % pool.num_kv_heads == 0
        self._pool = pool
        self._limits = window, chunk
        self._cap = cap
        self._scale = pool.head_dim**-0.5 if scale is None else scale
        self._parts = [
            _MaskedGroup(group, _mask(group, pool, dtype, window, chunk))
            for group in make_groups(spans, pool, window=window)
        ]

    @property
    def groups(self) -> list[AttentionGroup]:
        return [part.group for part in self._parts]

    def __call__(
        self,
        layer: int,
        queries: torch.Tensor,
        sinks: torch.Tensor | None = None,
        choice: Choice | None = None,
        entries: Sequence[Entries] | None = None,
    ) -> torch.Tensor:
        """Returns the attention output for queries [T, heads, D], in the same shape. The K and V of
        the step's tokens must already be in the pool. `sinks` is [heads]. With `choice`, queries
        attend only to the chosen keys. `entries` has further keys for each group, if there is one
        KV head.
        """
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for number, part in enumerate(self._parts):
            if choice is not None:
                part = _MaskedGroup(part.group, _added(choice[number], queries.dtype))
            group = part.group
            rows = slice(group.first_row, group.first_row + group.num_rows)
            kv = self._pool.gather(layer, group.block_rows, group.num_seqs).to(queries.dtype)
            if entries is not None:
                kv, part = self._with_entries(kv, part, entries[number])
            attend = _attend_one_query if group.num_queries == 1 else _attend_chunk
            attend(queries[rows], kv, part.mask, sinks, self._product, out[rows])
            if any(group.shares):
                self._add_shares(part, queries[rows], kv[0], sinks)
        return out

    def _with_entries(
        self, kv: torch.Tensor, part: _MaskedGroup, entries: Entries
    ) -> tuple[torch.Tensor, _MaskedGroup]:
        """Returns the keys and values of a group with those of the entries behind them, and the
        group with the mask of both."""
        mask = part.mask
        if mask is None:
            mask = _whole_mask(part.group, self._pool, kv.dtype, *self._limits)
        further = entries.keys.to(kv.dtype).unsqueeze(1).expand(2, -1, 1, -1, -1)
        of_entries = _added(~entries.hidden, kv.dtype).unsqueeze(1)
        whole = torch.cat((mask, of_entries), -1)
        return torch.cat((kv, further), -2), _MaskedGroup(part.group, whole)

    def _add_shares(
        self,
        part: _MaskedGroup,
        queries: torch.Tensor,
        keys: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> None:
        """For each sequence that has `BlockShares`, adds its softmax weights to them.

        The weights are computed again, because scaled_dot_product_attention does not return them.
        `queries` is [B * n, heads, D] for B sequences with n queries each.
        """
        group, num_kv_heads = part.group, keys.shape[1]
        shape = (group.num_seqs, group.num_queries, num_kv_heads, -1, queries.shape[-1])
        by_head = queries.view(shape).permute(0, 2, 3, 1, 4)  # [B, KV heads, group, n, D]
        mask = None if part.mask is None else part.mask.unsqueeze(2)
        if mask is None:
            keys = keys[..., : group.num_queries, :]
        if sinks is not None:
            sinks = sinks.view(num_kv_heads, -1, 1, 1)
        weights = self._weights(by_head, keys.unsqueeze(2), mask, sinks)
        by_query = weights.permute(0, 3, 1, 2, 4).flatten(2, 3)
        for shares, sequence_weights in zip(group.shares, by_query, strict=True):
            if shares is not None:
                missing = -sequence_weights.shape[-1] % self._pool.block_size
                shares.add(torch.nn.functional.pad(sequence_weights, (0, missing)))

    def _product(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns the attention output for queries [..., n, D] and keys [..., keys, D]. If `mask`
        is None, the attention is causal and there must be n keys. `sinks` is [..., n or 1, 1]."""
        if self._cap is None and sinks is None:
            return scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=self._scale
            )
        weights = self._weights(queries, keys, mask, sinks)
        return (weights @ values.float()).to(queries.dtype)

    def _weights(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns the softmax weights of each query for each key, fp32 [..., n, keys]. The
        arguments are as in `_product`."""
        scores = queries.float() @ keys.float().transpose(-1, -2) * self._scale
        if self._cap is not None:
            scores = torch.tanh(scores / self._cap) * self._cap
        if mask is None:
            ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(ahead, float("-inf"))
        else:
            scores = scores + mask
        if sinks is not None:
            scores = torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), -1)
        return softmax(scores, -1)[..., : keys.shape[-2]]


def _attend_one_query(
    queries: torch.Tensor,
    kv: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    product: _Product,
    out: torch.Tensor,
) -> None:
    """Writes the attention output for queries [B, heads, D], one token per sequence, to `out`. The
    heads that share a KV head are the rows of one matrix product."""
    num_seqs, num_kv_heads, _, head_dim = kv[0].shape
    grouped = queries.view(num_seqs, num_kv_heads, -1, head_dim)
    if sinks is not None:
        sinks = sinks.view(num_kv_heads, -1, 1)
    result = product(grouped, kv[0], kv[1], mask, sinks)
    out.view(grouped.shape).copy_(result)


def _attend_chunk(
    queries: torch.Tensor,
    kv: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    product: _Product,
    out: torch.Tensor,
) -> None:
    """Writes the attention output for queries [n, heads, D] of one sequence to `out`. K and V are
    expanded, not copied, for the heads that share a KV head."""
    num_queries, num_heads, head_dim = queries.shape
    num_kv_heads = kv.shape[2]
    group_size = num_heads // num_kv_heads
    grouped = queries.view(num_queries, num_kv_heads, group_size, head_dim).permute(1, 2, 0, 3)
    keys, values = kv[:, 0].unsqueeze(2).expand(-1, -1, group_size, -1, -1)
    if mask is None:
        keys, values = keys[..., :num_queries, :], values[..., :num_queries, :]
    else:
        mask = mask.transpose(0, 1)  # [1 or KV heads, 1, n, keys]
    if sinks is not None:
        sinks = sinks.view(num_kv_heads, group_size, 1, 1)
    result = product(grouped, keys, values, mask, sinks)
    out.view(num_queries, num_kv_heads, group_size, head_dim).copy_(result.permute(2, 0, 1, 3))


def _added(chosen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the mask that is added to the scores: 0 where `chosen` is true, -inf elsewhere."""
    return torch.zeros(chosen.shape, dtype=dtype, device=chosen.device).masked_fill_(
        ~chosen, float("-inf")
    )


def scores(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Returns the products [B, n, K] of queries [B, n, D] and keys [B, K, D]."""
    return queries @ keys.transpose(-1, -2)


def _mask(
    group: AttentionGroup,
    pool: KvPool,
    dtype: torch.dtype,
    window: int | None,
    chunk: int | None,
) -> torch.Tensor | None:
    """Returns a mask [B, 1, num_queries, padded context] to add to the scores: 0 where a query
    attends to a key, -inf elsewhere. Returns None if causal masking is enough."""
    if group.num_queries == max(group.context_lens) > 1 and group.sees_all(window, chunk):
        return None
    return _whole_mask(group, pool, dtype, window, chunk)


def _whole_mask(
    group: AttentionGroup,
    pool: KvPool,
    dtype: torch.dtype,
    window: int | None,
    chunk: int | None,
) -> torch.Tensor:
    """Returns the mask that `_mask` describes, also where causal masking is enough."""
    longest = max(group.context_lens)
    padded = -(-longest // pool.block_size) * pool.block_size
    lens = torch.tensor(group.context_lens, device=pool.device).view(-1, 1, 1, 1)
    queries = torch.arange(1 - group.num_queries, 1, device=pool.device).view(-1, 1)
    keys, ends = torch.arange(padded, device=pool.device), lens + queries
    return _added(~group.hidden(keys, ends, window, chunk), dtype)

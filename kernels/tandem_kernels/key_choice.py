"""The choice of keys in sparse attention, with torch.

A query attends to the `top_k` keys with the highest scores. Of keys with equal scores, those at
lower positions are chosen. The score of key s for query t is an fp32 sum over an indexer's heads:

    score(t, s) = sum over h of weights[t, h] * relu(queries[t, h] . keys[s])
"""

from collections.abc import Callable, Sequence

import torch

from tandem_kernels.attention_groups import AttentionGroup
from tandem_kernels.kv_cache import KvPool

# For each group of sequences, the keys to which each query attends: bool [B, 1, num_queries, padded
# context].
Choice = Sequence[torch.Tensor]
# (queries [B, n, D], keys [B, K, D]) -> products [B, n, K]
Scores = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_PRODUCTS_MAX = 1 << 22  # largest number of products of queries and keys that are kept at once


class KeyChoice:
    """Chooses keys for the queries of one step. Masks are created once and used in every layer."""

    def __init__(self, groups: Sequence[AttentionGroup], pool: KvPool, scores: Scores) -> None:
        """`groups` are those of the attention of the step. `scores` computes products of queries
        and keys."""
        self._groups = groups
        self._pool = pool
        self._scores = scores
        self._hidden = [_hidden(group, pool) for group in groups]

    def choose(
        self, number: int, queries: torch.Tensor, weights: torch.Tensor, top_k: int
    ) -> Choice:
        """Returns the chosen keys for queries [T, heads, D] with weights [T, heads]. `number` is
        the layer's index among the layers with an indexer. The indexer's keys of the step's tokens
        must already be in the pool."""
        choice = []
        for group, hidden in zip(self._groups, self._hidden, strict=True):
            chosen = ~hidden
            if max(group.context_lens) > top_k:
                rows = slice(group.first_row, group.first_row + group.num_rows)
                shape = group.num_seqs, group.num_queries, queries.shape[1]
                of_group = self._scores_of(
                    self._pool.gather_index(number, group.block_tables).float(),
                    queries[rows].float().view(*shape, -1),
                    weights[rows].float().view(shape),
                )
                chosen = highest(of_group.masked_fill_(hidden, float("-inf")), top_k)
            choice.append(chosen.unsqueeze(1))
        return choice

    def _scores_of(
        self, keys: torch.Tensor, queries: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Returns the scores [B, n, K] of keys [B, K, D] for queries [B, n, heads, D] with weights
        [B, n, heads]."""
        num_seqs, num_queries, num_heads, _ = queries.shape
        out = queries.new_zeros(num_seqs, num_queries, keys.shape[1])
        step = max(1, _PRODUCTS_MAX // (num_seqs * num_heads * keys.shape[1]))
        for first in range(0, num_queries, step):
            some = slice(first, first + step)
            products = self._scores(queries[:, some].flatten(1, 2), keys).relu_()
            by_head = products.view(num_seqs, -1, num_heads, keys.shape[1])
            # One head after the other, so that the bits of a score do not depend on the shape.
            for head in range(num_heads):
                out[:, some] += by_head[:, :, head] * weights[:, some, head].unsqueeze(-1)
        return out


def highest(scores: torch.Tensor, num: int) -> torch.Tensor:
    """Returns a mask of the shape of `scores` that is true for the `num` highest scores of each
    row. Of equal scores, those with lower indices are taken first. A score of -inf is never
    taken."""
    if num >= scores.shape[-1]:
        return scores > float("-inf")
    lowest = scores.topk(num, -1).values[..., -1:]
    above, equal = scores > lowest, scores == lowest
    num_equal = num - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= num_equal))) & (scores > float("-inf"))


def _hidden(group: AttentionGroup, pool: KvPool) -> torch.Tensor:
    """Returns a mask [B, num_queries, padded context] that is true for keys after the query."""
    keys = torch.arange(group.block_tables.shape[1] * pool.block_size, device=pool.device)
    lens = torch.tensor(group.context_lens, device=pool.device).view(-1, 1, 1)
    queries = torch.arange(1 - group.num_queries, 1, device=pool.device).view(-1, 1)
    return keys >= lens + queries

"""The choice of keys in sparse attention, with torch.

Tokens: a query attends to the `top_k` keys with the highest scores. The score of key s for query t
is an fp32 sum over an indexer's heads:

    score(t, s) = sum over h of weights[t, h] * relu(queries[t, h] . keys[s])

Blocks: each head of the indexer chooses for one KV head. The score of a block of keys is the
highest queries[t, h] . keys[s] of its keys up to position t. A query attends to the keys of the
`top_k` blocks with the highest scores. The block of the query and those just before it come first.

Of keys or blocks with equal scores, those at lower positions are chosen.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from tandem_kernels.attention_groups import AttentionGroup
from tandem_kernels.kv_cache import KvPool

# For each group of sequences, the keys to which each query attends: bool [B, heads, num_queries,
# padded context]. There is one head, or one for each KV head.
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

    def choose_tokens(
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
                keys = self._pool.gather_index(number, group.block_tables)
                chosen = choose_keys(
                    keys, hidden, queries[rows], weights[rows], top_k, self._scores
                )
            choice.append(chosen.unsqueeze(1))
        return choice

    def choose_blocks(
        self,
        number: int,
        queries: torch.Tensor,
        top_k: int,
        *,
        block_size: int,
        num_local: int,
    ) -> Choice:
        """Returns the chosen keys for queries [T, heads, D], in blocks of `block_size` keys. The
        block of a query, and the ones before it, `num_local` in all, come first. `number` is as in
        `choose_tokens`."""
        choice = []
        for group, hidden in zip(self._groups, self._hidden, strict=True):
            chosen = ~hidden.unsqueeze(1)
            if max(group.context_lens) > top_k * block_size:
                rows = slice(group.first_row, group.first_row + group.num_rows)
                parts = []
                keys = self._pool.gather_index(number, group.block_tables)
                of_heads = queries[rows].view(len(keys), -1, *queries.shape[1:])
                for some, products in _products(keys, of_heads, self._scores):
                    unseen = hidden[:, None, some]
                    products.masked_fill_(unseen, float("-inf"))
                    blocks = _highest_of_blocks(products, block_size)
                    own = ((~unseen).sum(-1, keepdim=True) - 1) // block_size
                    distance = own - torch.arange(blocks.shape[-1], device=blocks.device)
                    is_local = (distance >= 0) & (distance < num_local)
                    blocks.masked_fill_(is_local, float("inf"))
                    keys = highest(blocks, top_k).repeat_interleave(block_size, -1)
                    parts.append(keys[..., : hidden.shape[-1]] & ~unseen)
                chosen = torch.cat(parts, 2)
            choice.append(chosen)
        return choice


def choose_keys(
    keys: torch.Tensor,
    hidden: torch.Tensor,
    queries: torch.Tensor,
    weights: torch.Tensor,
    top_k: int,
    scores: Scores,
) -> torch.Tensor:
    """Returns the `top_k` keys with the highest scores for each query, of those that are not
    hidden: bool [B, n, K], for B sequences with n queries each.

    keys      [B, K, D]
    hidden    bool [B, n, K]
    queries   [B * n, heads, D]
    weights   [B * n, heads]
    """
    queries = queries.view(len(keys), -1, *queries.shape[1:])
    shares = weights.float().view(queries.shape[:3])
    sums = torch.zeros(hidden.shape, device=hidden.device)
    for some, products in _products(keys, queries, scores):
        products.relu_()
        # One head after the other, so that the bits of a sum do not depend on the shape.
        for head in range(products.shape[1]):
            sums[:, some] += products[:, head] * shares[:, some, head].unsqueeze(-1)
    return highest(sums.masked_fill_(hidden, float("-inf")), top_k)


def _products(
    keys: torch.Tensor, queries: torch.Tensor, scores: Scores
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yields the products of queries [B, n, heads, D] and keys [B, K, D], for some queries after
    the other: which ones, and fp32 [B, heads, queries, K]."""
    keys, queries = keys.float(), queries.float()
    num_heads = queries.shape[2]
    step = max(1, _PRODUCTS_MAX // (keys.shape[0] * keys.shape[1] * num_heads))
    for first in range(0, queries.shape[1], step):
        some = slice(first, first + step)
        products = scores(queries[:, some].flatten(1, 2), keys)
        yield some, products.view(len(keys), -1, num_heads, keys.shape[1]).transpose(1, 2)


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


def _highest_of_blocks(scores: torch.Tensor, block_size: int) -> torch.Tensor:
    """Returns the highest score of each block of keys. The last block may have fewer keys."""
    padding = -scores.shape[-1] % block_size
    padded = torch.nn.functional.pad(scores, (0, padding), value=float("-inf"))
    return padded.view(*scores.shape[:-1], -1, block_size).amax(-1)


def _hidden(group: AttentionGroup, pool: KvPool) -> torch.Tensor:
    """Returns a mask [B, num_queries, padded context] that is true for keys after the query."""
    keys = torch.arange(group.block_tables.shape[1] * pool.block_size, device=pool.device)
    lens = torch.tensor(group.context_lens, device=pool.device).view(-1, 1, 1)
    queries = torch.arange(1 - group.num_queries, 1, device=pool.device).view(-1, 1)
    return keys >= lens + queries

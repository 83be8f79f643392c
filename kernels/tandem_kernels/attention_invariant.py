"""Batch-invariant attention in fp32, by the formula of attention.py: all bits of a query's result
depend only on the query's own sequence.

The result does not depend on other sequences, the chunk boundaries, the block size or the number of
threads, because all matrix products have one shape and all sums have one order:

- A product multiplies a row tile [16, D] by a key tile [64, D]. The 16 rows of a row tile are pairs
  of a query and a head, all for the same KV head, padded with zero rows. A key tile has 64 keys,
  the first of which has a position that is a multiple of 64.
- The scores of N row tiles are [key tiles, N, 16, 64], with -inf for hidden keys.
- The output is summed over the key tiles in ascending order, and then over the tiles of entries.
  The maximum score of a row is computed over all keys first, so partial sums need not be rescaled.
  A hidden key adds exactly 0, so key tiles before a window may be skipped.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from tandem_kernels.attention_groups import AttentionGroup, Entries, QuerySpan, make_groups
from tandem_kernels.key_choice import Choice
from tandem_kernels.kv_cache import KvPool

ROW_TILE = 16
KEY_TILE = 64


@dataclass(frozen=True, slots=True)
class _TiledGroup:
    group: AttentionGroup
    hidden: torch.Tensor  # bool [key tiles, N, 16, 64]: true if the row does not attend to the key
    # For each key tile: the index of the first row tile whose context reaches this key tile.
    first_row_tile: list[int]


class InvariantPagedAttention:
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
        assert dtype == pool.dtype == torch.float32
        self._pool = pool
        self._cap = cap
        self._scale = pool.head_dim**-0.5 if scale is None else scale
        self._group_size = num_heads // pool.num_kv_heads
        self._tiles_per_query = -(-self._group_size // ROW_TILE)
        padded_to = math.lcm(KEY_TILE, pool.block_size)
        groups = make_groups(spans, pool, padded_to, window)
        self._parts = [self._tiled(group, window, chunk) for group in groups]

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
        out = torch.zeros_like(queries, memory_format=torch.contiguous_format)
        scaled = queries * self._scale
        if sinks is not None:
            sinks = sinks.view(-1, self._group_size)
        for number, part in enumerate(self._parts):
            group = part.group
            rows = slice(group.first_row, group.first_row + group.num_rows)
            kv = self._pool.gather(layer, group.block_rows, group.num_seqs)
            if entries is not None:
                kv, part = self._with_entries(kv, part, entries[number])
            if group.num_queries == 1:
                if choice is not None:
                    part = replace(part, hidden=self._hidden_of_tiles(choice[number]))
                self._attend_one_query(part, scaled[rows], kv, sinks, out[rows])
                continue
            of_heads = [part] * self._pool.num_kv_heads
            if choice is not None:
                chosen = choice[number].expand(-1, self._pool.num_kv_heads, -1, -1)
                of_heads = [
                    replace(part, hidden=self._hidden_of_rows(chosen[0, head]))
                    for head in range(self._pool.num_kv_heads)
                ]
            self._attend_chunk(of_heads, scaled[rows], kv, sinks, out[rows])
        return out

    def _attend_one_query(
        self,
        part: _TiledGroup,
        queries: torch.Tensor,
        kv: torch.Tensor,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Writes the attention output for queries [B, heads, D], one token per sequence, to `out`.
        The heads that share a KV head of a sequence form one row tile, or several if there are more
        than 16 heads."""
        head_dim = queries.shape[-1]
        rows = _padded_rows(queries.reshape(-1, self._group_size, head_dim))
        if self._tiles_per_query > 1:
            kv = kv.repeat_interleave(self._tiles_per_query, dim=2)
        keys, values = kv.flatten(1, 2)
        if sinks is not None:
            sinks = _padded_rows(sinks.unsqueeze(-1)).repeat(len(queries), 1, 1).view(-1, ROW_TILE)
        tiles = rows.view(-1, ROW_TILE, head_dim)
        result, weights = _attend_tiles(part, tiles, keys, values, self._cap, sinks)
        used = result.view(rows.shape)[:, : self._group_size]
        if any(part.group.shares):
            by_query = weights().view(*rows.shape[:2], -1)[:, : self._group_size]
            by_query = by_query.reshape(len(queries), 1, queries.shape[1], -1)
            for shares, of_query in zip(part.group.shares, by_query, strict=True):
                if shares is not None:
                    shares.add(of_query)
        out.view(-1, self._group_size, head_dim).copy_(used)

    def _attend_chunk(
        self,
        of_heads: Sequence[_TiledGroup],
        queries: torch.Tensor,
        kv: torch.Tensor,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Writes the attention output for queries [n, heads, D] of one sequence to `out`. Computes
        one KV head after the other. `of_heads` has the sequence with the mask of each KV head."""
        num_queries, _, head_dim = queries.shape
        shape = (num_queries, self._pool.num_kv_heads, self._group_size, head_dim)
        by_head = queries.view(shape).transpose(0, 1).reshape(shape[1], 1, -1, head_dim)
        out_by_head = out.view(shape).transpose(0, 1)
        for head in range(shape[1]):
            tiles = _padded_rows(by_head[head]).view(-1, ROW_TILE, head_dim)
            keys, values = kv[:, 0, head].unsqueeze(1).expand(-1, tiles.shape[0], -1, -1)
            row_sinks = None
            if sinks is not None:
                by_query = sinks[head].repeat(num_queries).view(1, -1, 1)
                row_sinks = _padded_rows(by_query).view(-1, ROW_TILE)
            part = of_heads[head]
            result, weights = _attend_tiles(part, tiles, keys, values, self._cap, row_sinks)
            used = result.view(-1, head_dim)[: num_queries * self._group_size]
            if (shares := part.group.shares[0]) is not None:
                head_weights = weights()[: num_queries * self._group_size]
                shares.add(head_weights.view(num_queries, self._group_size, -1))
            out_by_head[head].copy_(used.view(num_queries, self._group_size, head_dim))

    def _with_entries(
        self, kv: torch.Tensor, part: _TiledGroup, entries: Entries
    ) -> tuple[torch.Tensor, _TiledGroup]:
        """Returns the keys and values of a group with those of the entries behind them, and the
        group with the mask of both. All row tiles attend to the tiles of entries."""
        padding = -entries.keys.shape[1] % KEY_TILE
        keys = torch.nn.functional.pad(entries.keys, (0, 0, 0, padding))
        further = keys.unsqueeze(1).expand(2, -1, 1, -1, -1)
        seen = torch.nn.functional.pad(~entries.hidden, (0, padding))
        of_rows = self._hidden_of_tiles if part.group.num_queries == 1 else self._hidden_of_rows
        hidden = of_rows(seen.unsqueeze(1) if part.group.num_queries == 1 else seen[0])
        whole = replace(
            part,
            hidden=torch.cat((part.hidden, hidden)),
            first_row_tile=part.first_row_tile + [0] * len(hidden),
        )
        return torch.cat((kv[..., : len(part.hidden) * KEY_TILE, :], further), -2), whole

    def _hidden_of_tiles(self, chosen: torch.Tensor) -> torch.Tensor:
        """Returns `_TiledGroup.hidden` for sequences with one query each and chosen keys,
        [B, 1 or KV heads, 1, padded context]."""
        by_head = ~chosen.expand(-1, self._pool.num_kv_heads, -1, -1).flatten(0, 2)
        return _in_tiles(by_head.repeat_interleave(self._tiles_per_query * ROW_TILE, 0))

    def _hidden_of_rows(self, chosen: torch.Tensor) -> torch.Tensor:
        """Returns `_TiledGroup.hidden` for the queries of one sequence and chosen keys of a KV
        head, [num_queries, padded context]."""
        by_row = (~chosen).repeat_interleave(self._group_size, 0)
        padding = -len(by_row) % ROW_TILE
        return _in_tiles(torch.cat((by_row, by_row[-1:].expand(padding, -1))))

    def _tiled(self, group: AttentionGroup, window: int | None, chunk: int | None) -> _TiledGroup:
        """Creates the mask of a group, and finds the row tiles that attend to each key tile.

        Row tiles are ordered by the length of their contexts. So the row tiles that attend to a key
        tile are the last ones: with contexts of 100, 150 and 200 keys, only the last two attend to
        the third key tile, which begins with key 128. If a window has removed blocks, the order may
        not be exact. Then a few more row tiles are computed, and the mask hides the key tile from
        them.
        """
        device, tiles_per_sequence = self._pool.device, 1
        if group.num_queries == 1:
            tiles_per_sequence = self._pool.num_kv_heads * self._tiles_per_query
            lens = torch.tensor(group.context_lens).repeat_interleave(tiles_per_sequence)
            visible = lens.unsqueeze(1).expand(-1, ROW_TILE)
        else:
            context_len = group.context_lens[0]
            lens = torch.arange(context_len - group.num_queries, context_len) + 1
            rows = lens.repeat_interleave(self._group_size)
            padding = -rows.shape[0] % ROW_TILE
            visible = torch.cat((rows, rows[-1:].expand(padding))).view(-1, ROW_TILE)
        num_key_tiles = -(-max(group.context_lens) // KEY_TILE)
        keys = torch.arange(num_key_tiles * KEY_TILE).view(num_key_tiles, 1, 1, KEY_TILE)
        firsts = torch.arange(num_key_tiles) * KEY_TILE
        hidden = group.hidden(keys, visible.unsqueeze(-1), window, chunk, tiles_per_sequence)
        return _TiledGroup(
            group=group,
            hidden=hidden.to(device),
            first_row_tile=torch.searchsorted(
                visible.amax(1).cummax(0).values, firsts, right=True
            ).tolist(),
        )


def _in_tiles(hidden: torch.Tensor) -> torch.Tensor:
    """Returns a mask [rows, padded context] as [key tiles, N, 16, 64]."""
    num_key_tiles = hidden.shape[1] // KEY_TILE
    return hidden.view(-1, ROW_TILE, num_key_tiles, KEY_TILE).permute(2, 0, 1, 3)


def scores_invariant(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Returns the products [B, n, K] of queries [B, n, D] and keys [B, K, D]. K must be a multiple
    of 64. The bits of a product depend neither on the other queries nor on the other keys."""
    rows = _padded_rows(queries)
    tiles = rows.view(-1, ROW_TILE, rows.shape[-1])
    keys = keys.repeat_interleave(rows.shape[1] // ROW_TILE, 0)
    key_tiles = torch.split(keys, KEY_TILE, 1)
    out = torch.cat([torch.bmm(tiles, tile.transpose(1, 2)) for tile in key_tiles], -1)
    return out.view(*rows.shape[:2], -1)[:, : queries.shape[1]]


def _padded_rows(rows: torch.Tensor) -> torch.Tensor:
    """Pads [groups, rows, D] with zero rows, so that the number of rows is a multiple of 16."""
    num_groups, num_rows, head_dim = rows.shape
    padded = rows.new_zeros(num_groups, -(-num_rows // ROW_TILE) * ROW_TILE, head_dim)
    padded[:, :num_rows] = rows
    return padded


def _attend_tiles(
    part: _TiledGroup,
    tiles: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cap: float | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """Returns the attention output [N, 16, D] of N row tiles, and a function that computes the
    softmax weights [N * 16, padded context].

    tiles           [N, 16, D]: queries, multiplied by the scale
    keys, values    [N, padded context, D]
    sinks           [N, 16]
    """
    scores = tiles.new_full(part.hidden.shape, float("-inf"))
    for t, first in enumerate(part.first_row_tile):
        key_tile = keys[first:, t * KEY_TILE : (t + 1) * KEY_TILE]
        torch.bmm(tiles[first:], key_tile.transpose(1, 2), out=scores[t, first:])
    if cap is not None:
        scores.div_(cap).tanh_().mul_(cap)
    scores.masked_fill_(part.hidden, float("-inf"))
    highest = scores.amax((0, 3))
    weights = scores.sub_(highest.unsqueeze(-1)).exp_()
    tile_sums = weights.sum(-1)
    sums = torch.zeros_like(tile_sums[0]) if sinks is None else (sinks - highest).exp_()
    out = torch.zeros_like(tiles)
    for t, first in enumerate(part.first_row_tile):
        sums[first:] += tile_sums[t, first:]
        out[first:].baddbmm_(weights[t, first:], values[first:, t * KEY_TILE : (t + 1) * KEY_TILE])

    def shares() -> torch.Tensor:
        return (weights / sums.unsqueeze(-1)).permute(1, 2, 0, 3).reshape(sums.numel(), -1)

    return out.div_(sums.unsqueeze(-1)), shares

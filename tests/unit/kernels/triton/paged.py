"""Pools with scattered blocks for the attention kernels, and attention written out in fp64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem_kernels.kv_cache import KvPool
from tests.kv_pools import empty_pool

LAYERS, LAYER = 2, 1
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True)
class Paged:
    """`lens` tokens of each sequence in a random pool, its blocks in random order."""

    pool: KvPool
    block_tables: torch.Tensor
    context_lens: torch.Tensor

    @classmethod
    def random(
        cls,
        lens: Sequence[int],
        *,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: str,
        device: torch.device,
        has_values: bool = True,
    ) -> Paged:
        """`dtype` is the pool's, as layouts name it. Without values, keys are values."""
        counts = [-(-n // block_size) for n in lens]
        num_blocks = sum(counts) + 2
        sizes = num_blocks, num_kv_heads, LAYERS, block_size, head_dim
        layout = BlockLayout(*sizes, dtype, has_values)
        pool = empty_pool(layout, device)
        generator = torch.Generator().manual_seed(1)
        shape = (2, num_blocks * block_size, num_kv_heads, head_dim)
        blocks = torch.arange(num_blocks, device=device).repeat_interleave(block_size)
        offsets = torch.arange(block_size, device=device).repeat(num_blocks)
        for layer in range(LAYERS):
            keys, values = torch.randn(shape, generator=generator).to(device)
            pool.write(layer, pool.token_rows(blocks, offsets), keys, values)
        free = list(range(num_blocks))
        random.Random(2).shuffle(free)
        tables = torch.zeros(len(lens), max(1, *counts), dtype=torch.int32)
        for row, count in zip(tables, counts, strict=True):
            row[:count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
        context_lens = torch.tensor(lens, dtype=torch.int32)
        return cls(pool, tables.to(device), context_lens.to(device))

    @property
    def layer(self) -> torch.Tensor:
        return self.pool.layer(LAYER).numbers

    @property
    def scales(self) -> torch.Tensor | None:
        return self.pool.layer(LAYER).scales

    def pass_window(self, seq: int, num_queries: int, window: int | None) -> None:
        """Takes the blocks that none of a sequence's last queries sees out of its table."""
        if window is not None:
            first_key = max(0, int(self.context_lens[seq]) - num_queries + 1 - window)
            self.block_tables[seq, : first_key // self.pool.block_size] = 2**30

    def attention(
        self,
        seq: int,
        queries: torch.Tensor,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes attention of queries [n, heads, D], the last tokens of a sequence's context, in
        fp64. Sinks are keys [heads] without values."""
        rows = self.pool.block_rows(self.block_tables[seq : seq + 1].long())
        keys, values = self.pool.gather(LAYER, rows, 1).squeeze(1).double()
        group_size = queries.shape[1] // keys.shape[0]
        context_len = int(self.context_lens[seq])
        out = []
        for i, query in enumerate(queries.double()):
            seen = context_len - queries.shape[0] + i + 1
            first = max(0, seen - window) if window else 0
            k = keys[:, first:seen].repeat_interleave(group_size, 0)
            v = values[:, first:seen].repeat_interleave(group_size, 0)
            scores = k @ query.unsqueeze(-1) / query.shape[-1] ** 0.5
            if sinks is not None:
                scores = torch.cat((scores, sinks.double().view(-1, 1, 1)), 1)
            weights = torch.softmax(scores, 1)[:, : k.shape[1]]
            out.append((weights * v).sum(1))
        return torch.stack(out)


def name_of(dtype: torch.dtype) -> str:
    """Returns how layouts name a dtype."""
    return str(dtype).removeprefix("torch.")


def random_queries(
    num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Returns queries [T, heads, D]: the first columns of wider rows, as a joint product makes
    them."""
    wide = torch.randn(
        num_tokens, num_heads + 3, head_dim, generator=torch.Generator().manual_seed(3)
    )
    return wide.to(device, dtype)[:, :num_heads]

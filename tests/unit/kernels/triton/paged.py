"""Pools with scattered blocks for the attention kernels, and attention written out in fp64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem_kernels.kv_cache import layer_of

LAYERS, LAYER = 2, 1
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True)
class Paged:
    """`lens` tokens of each sequence in a random pool, its blocks in random order."""

    kv: torch.Tensor
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
        dtype: torch.dtype,
        device: torch.device,
    ) -> Paged:
        counts = [-(-n // block_size) for n in lens]
        num_blocks = sum(counts) + 2
        shape = (num_blocks, num_kv_heads, LAYERS, 2, block_size, head_dim)
        kv = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
        free = list(range(num_blocks))
        random.Random(2).shuffle(free)
        tables = torch.zeros(len(lens), max(1, *counts), dtype=torch.int32)
        for row, count in zip(tables, counts, strict=True):
            row[:count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
        context_lens = torch.tensor(lens, dtype=torch.int32)
        return cls(kv, tables.to(device), context_lens.to(device))

    @property
    def layer(self) -> torch.Tensor:
        return layer_of(self.kv, LAYER)

    def pass_window(self, seq: int, num_queries: int, window: int | None) -> None:
        """Takes the blocks that none of a sequence's last queries sees out of its table."""
        if window is not None:
            first_key = max(0, int(self.context_lens[seq]) - num_queries + 1 - window)
            self.block_tables[seq, : first_key // self.kv.shape[4]] = 2**30

    def attention(
        self,
        seq: int,
        queries: torch.Tensor,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes attention of queries [n, heads, D], the last tokens of a sequence's context, in
        fp64. Sinks are keys [heads] without values."""
        kv = self.layer[self.block_tables[seq].long()].double()  # [M, heads, 2, block size, D]
        keys, values = kv.permute(2, 1, 0, 3, 4).flatten(2, 3)
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


def random_queries(
    num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Returns queries [T, heads, D]: the first columns of wider rows, as a joint product makes
    them."""
    wide = torch.randn(
        num_tokens, num_heads + 3, head_dim, generator=torch.Generator().manual_seed(3)
    )
    return wide.to(device, dtype)[:, :num_heads]

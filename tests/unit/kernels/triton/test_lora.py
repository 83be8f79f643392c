"""Adapters add to their rows of a product what the torch reference adds for each of them alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tandem_kernels import lora as reference
from tandem_kernels.lora import LoraPart
from tandem_kernels.triton.lora import NO_PART, LoraTiles, add_lora, part_fields

NUM_ROWS, NUM_IN, COLUMNS = 60, 150, (70, 30, 30)
# Ranks of the parts of each adapter; 0: it lacks the part.
RANKS = ((8, 0, 1), (16, 33, 70), (0, 4, 0))
ROWS = {2: [59, 0, 7], 0: list(range(20, 50)), 1: [3, 5]}


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def parts_of(ranks: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[LoraPart]:
    made, first = [], 0
    for rank, columns in zip(ranks, COLUMNS, strict=True):
        if rank:
            a, b = randn(rank, NUM_IN, seed=rank), randn(columns, rank, seed=rank + 1)
            made.append(LoraPart(first, a.to(device, dtype), b.to(device, dtype)))
        first += columns
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_row_gets_its_adapters_and_others_stay(
    dtype: torch.dtype, device: torch.device
) -> None:
    adapters = [parts_of(ranks, dtype, device) for ranks in RANKS]
    fields = [[*map(part_fields, parts), *[NO_PART] * (3 - len(parts))] for parts in adapters]
    parts = torch.tensor(fields, dtype=torch.int64, device=device)
    x = randn(NUM_ROWS, NUM_IN + 3, seed=5).to(device, dtype)[:, :NUM_IN] * 10
    out = randn(NUM_ROWS, sum(COLUMNS), seed=6).to(device, dtype)
    before, expected = out.clone(), out.clone()
    add_lora(out, x, LoraTiles.of(ROWS, device), parts, rank_max=70, columns_max=70)
    for adapter, rows in ROWS.items():
        at = torch.tensor(rows, device=device)
        reference.add_lora(expected, x, at, adapters[adapter], torch.nn.functional.linear)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    changed = (out != before).any(1).nonzero().flatten().tolist()
    assert changed == sorted(row for rows in ROWS.values() for row in rows)


def test_a_rows_bits_do_not_depend_on_the_adapters_beside_it(device: torch.device) -> None:
    """Its tile has the same shape and its sums the same order."""
    adapters = [parts_of(ranks, torch.float32, device) for ranks in RANKS]
    fields = [[*map(part_fields, parts), *[NO_PART] * (3 - len(parts))] for parts in adapters]
    parts = torch.tensor(fields, dtype=torch.int64, device=device)
    x, out = randn(NUM_ROWS, NUM_IN, seed=5).to(device), randn(NUM_ROWS, 130, seed=6).to(device)
    alone = out.clone()
    add_lora(out, x, LoraTiles.of(ROWS, device), parts, rank_max=70, columns_max=70)
    for adapter, rows in ROWS.items():
        tiles = LoraTiles.of({adapter: rows}, device)
        add_lora(alone, x, tiles, parts, rank_max=70, columns_max=70)
    assert torch.equal(out, alone)

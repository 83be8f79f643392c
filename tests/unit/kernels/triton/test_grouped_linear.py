"""Products of rows with their experts' matrices, against one product for each slot."""

from __future__ import annotations

import pytest
import torch

from tandem_kernels.triton.grouped_linear import grouped_linear, tile_by_expert


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("num_rows", "top_k", "num_experts"), [(1, 1, 1), (1, 3, 8), (40, 2, 5), (130, 2, 3)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_each_slot_is_its_experts_product(
    num_rows: int,
    top_k: int,
    num_experts: int,
    dtype: torch.dtype,
    has_bias: bool,
    device: torch.device,
) -> None:
    num_out, num_in = 70, 52
    chosen = randn(num_rows, num_experts, seed=1).topk(top_k).indices.to(device)
    weight = (randn(num_experts, num_out, num_in, seed=2) / num_in**0.5).to(device, dtype)
    bias = randn(num_experts, num_out, seed=3).to(device, dtype) if has_bias else None
    tiles = tile_by_expert(chosen, num_experts)
    slots = chosen.flatten()
    for x in (randn(num_rows, num_in, seed=4), randn(num_rows * top_k, num_in, seed=5)):
        x = x.to(device, dtype)
        of_slots = x.repeat_interleave(num_rows * top_k // len(x), 0).float()
        expected = (weight[slots].float() @ of_slots.unsqueeze(-1)).squeeze(-1)
        if bias is not None:
            expected += bias[slots].float()
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        found = grouped_linear(x, weight, bias, tiles).float()
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_an_expert_of_all_rows_and_one_of_none(device: torch.device) -> None:
    chosen = torch.tensor([[1, 3]] * 70 + [[1, 0]], device=device)
    tiles = tile_by_expert(chosen, 4)
    assert tiles.tile_rows == 64
    used = tiles.experts[tiles.experts < 4].tolist()
    assert used == [0, 1, 1, 3, 3]
    slots = tiles.slots.view(-1, 64)
    assert sorted(slots[slots >= 0].tolist()) == list(range(142))
    assert slots[0].tolist() == [141, *[-1] * 63]
    flat = chosen.flatten()
    for expert, tile in zip(used, slots.tolist(), strict=False):
        assert {int(flat[slot]) for slot in tile if slot >= 0} == {expert}

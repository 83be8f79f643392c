"""Products of rows with their experts' matrices, against one product for each slot."""

from __future__ import annotations

import pytest
import torch

from tandem.engine.executor.triton.products import packed_weight
from tandem.engine.executor.weights.decoder_weights import Quantized
from tandem.models.checkpoint.quantized.packed_groups import PackedGroups
from tandem_kernels.triton.grouped_linear import grouped_linear, mix, tile_by_expert
from tandem_kernels.triton.weight_tiles import PackedWeight
from tests.random_blocks import random_blocks
from tests.unit.kernels.triton.test_packed_linear import fp8, integers


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
        found = grouped_linear(x, PackedWeight("plain", weight.flatten(0, 1)), bias, tiles).float()
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_an_expert_of_all_rows_and_one_of_none(device: torch.device) -> None:
    chosen = torch.tensor([[1, 3]] * 70 + [[1, 0]], device=device)
    tiles = tile_by_expert(chosen, 4)
    assert tiles.tile_rows == 64
    assert tiles.experts.tolist()[5:] == [4] * (len(tiles.experts) - 5)
    used = tiles.experts[tiles.experts < 4].tolist()
    assert used == [0, 1, 1, 3, 3]
    slots = tiles.slots.view(-1, 64)
    assert sorted(slots[slots >= 0].tolist()) == list(range(142))
    assert slots[0].tolist() == [141, *[-1] * 63]
    flat = chosen.flatten()
    for expert, tile in zip(used, slots.tolist(), strict=False):
        assert {int(flat[slot]) for slot in tile if slot >= 0} == {expert}


def quantized(form: str, num_out: int, num_in: int) -> Quantized:
    if form == "mxfp4":
        return PackedGroups.of_blocks(random_blocks("MXFP4", num_out, num_in))
    if form == "e4m3":
        return fp8(num_out, num_in, num_in // 128)
    return integers(num_out, num_in, num_in // 64, "zeros")


@pytest.mark.parametrize("form", ["mxfp4", "e4m3", "int4"])
@pytest.mark.parametrize("num_rows", [2, 60])
def test_quantized_experts(form: str, num_rows: int, device: torch.device) -> None:
    num_experts, num_out, num_in = 3, 70, 256
    weight = quantized(form, num_experts * num_out, num_in).to(device)
    packed = packed_weight(weight)
    assert packed is not None
    chosen = randn(num_rows, num_experts, seed=1).topk(2).indices.to(device)
    x = randn(num_rows, num_in, seed=2).to(device)
    bias = randn(num_experts, num_out, seed=3).to(device)
    found = grouped_linear(x, packed, bias, tile_by_expert(chosen, num_experts))
    of_slots = weight.numbers().view(num_experts, num_out, num_in)[chosen.flatten()]
    expected = (of_slots @ x.repeat_interleave(2, 0).unsqueeze(-1)).squeeze(-1)
    expected += bias[chosen.flatten()]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("num_rows", "top_k", "num_experts"), [(1, 8, 300), (700, 4, 7), (1300, 1, 1), (600, 8, 64)]
)
def test_every_slot_is_in_a_tile_of_its_expert(
    num_rows: int, top_k: int, num_experts: int, device: torch.device
) -> None:
    """Many slots, many experts, and experts without slots."""
    chances = torch.rand(num_rows, num_experts, generator=torch.Generator().manual_seed(num_rows))
    chances[:, 1::3] -= 0.8
    chosen = chances.topk(top_k).indices.to(device)
    tiles = tile_by_expert(chosen, num_experts)
    slots = tiles.slots.view(len(tiles.experts), -1)
    assert sorted(slots[slots >= 0].tolist()) == list(range(num_rows * top_k))
    flat = chosen.flatten().tolist()
    assert tiles.experts.tolist() == sorted(tiles.experts.tolist())
    for expert, tile in zip(tiles.experts.tolist(), slots.tolist(), strict=True):
        used = [slot for slot in tile if slot >= 0]
        assert bool(used) == (expert < num_experts)
        assert used == sorted(used)
        assert {flat[slot] for slot in used} <= {expert}


def test_slots_of_other_ranks_experts_are_in_no_tile_and_add_nothing(device: torch.device) -> None:
    num_experts, num_out, num_in = 7, 20, 32
    own = slice(2, 5)
    chosen = randn(90, num_experts, seed=1).topk(3).indices.to(device)
    shares = randn(90, 3, seed=2).to(device)
    weight = randn(num_experts, num_out, num_in, seed=3).to(device)
    x = randn(90, num_in, seed=4).to(device)
    tiles = tile_by_expert(chosen, 3, first=own.start, num_all=num_experts)
    is_own = (chosen >= own.start) & (chosen < own.stop)
    found = tiles.slots[tiles.slots >= 0].sort().values
    assert found.tolist() == is_own.flatten().nonzero().flatten().tolist()
    parts = grouped_linear(x, PackedWeight("plain", weight[own].flatten(0, 1)), None, tiles)
    parts[~is_own.flatten()] = torch.nan  # nothing was written there
    shares = torch.where(is_own, shares, 0.0)
    of_all = torch.einsum("ti,eoi->teo", x, weight)
    expected = (
        of_all.gather(1, chosen[..., None].expand(-1, -1, num_out)) * shares[..., None]
    ).sum(1)
    torch.testing.assert_close(mix(parts, shares, None), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("has_shared", [True, False])
def test_slots_are_mixed_by_their_shares(has_shared: bool, device: torch.device) -> None:
    parts = randn(3 * 4, 1030, seed=1).to(device)
    shares = randn(3, 4, seed=2).to(device)
    shared = randn(3, 1030, seed=3).to(device) if has_shared else None
    expected = (parts.view(3, 4, -1) * shares.unsqueeze(-1)).sum(1)
    if shared is not None:
        expected += shared
    torch.testing.assert_close(mix(parts, shares, shared), expected, rtol=1e-5, atol=1e-5)

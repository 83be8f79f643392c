"""Products with integers in groups, against products with the numbers that they stand for."""

from __future__ import annotations

import pytest
import torch

from tandem.models.checkpoint.quantized.packed_groups import PackedGroups
from tandem_kernels.triton.packed_linear import can_multiply, packed_linear


def matrix(num_out: int, num_in: int, groups: int, form: str) -> PackedGroups:
    chance = torch.Generator().manual_seed(groups)

    def scales(size: float) -> torch.Tensor:
        return (torch.rand(num_out, groups, generator=chance) * size / num_in**0.5).half()

    if form == "int8":
        numbers = torch.randint(-127, 128, (num_out, num_in), generator=chance).to(torch.int8)
        return PackedGroups.of(numbers, scales(0.02))
    numbers = torch.randint(0, 16, (num_out, num_in), generator=chance).byte()
    zeros = torch.randint(0, 17, (num_out, groups), generator=chance).byte()
    packed = PackedGroups.of(numbers, scales(0.2), zeros if form == "zeros" else None)
    if form == "mins":
        packed = PackedGroups(packed.data, packed.scales, None, -8 * packed.scales)
    return packed


@pytest.mark.parametrize("form", ["int8", "zeros", "mins"])
@pytest.mark.parametrize("num_rows", [1, 16, 70])
@pytest.mark.parametrize(("num_out", "num_in", "groups"), [(70, 96, 3), (33, 256, 2), (40, 88, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_multiplies_with_the_numbers(
    form: str,
    num_rows: int,
    num_out: int,
    num_in: int,
    groups: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    assert can_multiply(num_in, groups)
    packed = matrix(num_out, num_in, groups, form).to(device)
    chance = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, num_in + 8, generator=chance).to(device, dtype)[:, :num_in]
    bias = torch.randn(num_out, generator=chance).to(device, dtype) if groups == 2 else None
    expected = x.float() @ packed.numbers().to(dtype).float().t()
    if bias is not None:
        expected += bias.float()
    found = packed_linear(x, packed.data, packed.scales, packed.zeros, packed.mins, bias)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


def test_sizes_of_groups() -> None:
    assert all(can_multiply(1024, groups) for groups in (1, 8, 16, 32))
    assert not can_multiply(96, 2)

"""Products with quantized weights, against products with the numbers that they stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton

from tandem.engine.executor.triton.products import packed_weight
from tandem.engine.executor.weights.decoder_weights import Quantized
from tandem.models.checkpoint.quantized.fp8 import Fp8
from tandem.models.checkpoint.quantized.packed_groups import PackedGroups, by_columns
from tandem_kernels.triton.packed_linear import (
    CONFIGS,
    _packed_linear,
    choose_splits,
    packed_linear,
)
from tandem_kernels.triton.weight_tiles import Form, PackedWeight, can_multiply
from tests.random_blocks import TYPES, random_blocks


def integers(num_out: int, num_in: int, groups: int, form: str) -> PackedGroups:
    chance = torch.Generator().manual_seed(groups)

    def scales(size: float) -> torch.Tensor:
        return (torch.rand(num_out, groups, generator=chance) * size / num_in**0.5).half()

    if form == "int8":
        numbers = torch.randint(-127, 128, (num_out, num_in), generator=chance).to(torch.int8)
        packed = PackedGroups.of(numbers, scales(0.02))
    else:
        numbers = torch.randint(0, 16, (num_out, num_in), generator=chance).byte()
        zeros = torch.randint(0, 17, (num_out, groups), generator=chance).byte()
        packed = PackedGroups.of(numbers, scales(0.2), zeros if form == "zeros" else None)
    assert packed is not None
    return replace(packed, mins=-8 * packed.scales) if form == "mins" else packed


def fp8(num_out: int, num_in: int, runs: int) -> Fp8:
    chance = torch.Generator().manual_seed(runs)
    numbers = torch.randn(num_out, num_in, generator=chance) * 30
    numbers[0, :4] = torch.tensor([448.0, -448.0, 2**-9, -(2**-9)])  # the largest and the smallest
    scales = torch.rand(num_out, runs, generator=chance) / 30 / num_in**0.5
    return Fp8(numbers.to(torch.float8_e4m3fn), by_columns(scales))


def check(
    weight: Quantized,
    num_rows: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    has_bias: bool = False,
    splits: int = 1,
) -> None:
    packed = packed_weight(weight.to(device))
    assert packed is not None
    num_out, num_in = weight.shape
    chance = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, num_in + 8, generator=chance).to(device, dtype)[:, :num_in]
    bias = torch.randn(num_out, generator=chance).to(device, dtype) if has_bias else None
    expected = x.float() @ weight.to(device).numbers().to(dtype).float().t()
    if bias is not None:
        expected += bias.float()
    wide = torch.full((num_rows, num_out + 5), 7.0, dtype=dtype, device=device)
    packed_linear(x, packed, bias, out=wide[:, 2 : num_out + 2], splits=splits)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    found = wide[:, 2 : num_out + 2].float()
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert (wide[:, :2] == 7).all()
    assert (wide[:, num_out + 2 :] == 7).all()


@pytest.mark.parametrize("form", ["int8", "zeros", "mins"])
@pytest.mark.parametrize("num_rows", [1, 16, 70])
@pytest.mark.parametrize(("num_out", "num_in", "groups"), [(70, 96, 3), (33, 256, 2), (40, 88, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_integers(
    form: str,
    num_rows: int,
    num_out: int,
    num_in: int,
    groups: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    weight = integers(num_out, num_in, groups, form)
    check(weight, num_rows, dtype, device, has_bias=groups == 2)


def test_a_zero_for_all_groups(device: torch.device) -> None:
    numbers = torch.randint(0, 16, (70, 96), generator=torch.Generator().manual_seed(1)).byte()
    packed = PackedGroups.of(numbers, torch.full((70, 3), 0.01), torch.tensor([[8]]).byte())
    assert packed is not None
    assert packed.zeros is None
    assert torch.equal(packed.numbers(), (numbers.float() - 8) * 0.01)
    check(packed, 3, torch.float32, device)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_of_gguf(name: str, dtype: torch.dtype, device: torch.device) -> None:
    check(PackedGroups.of_blocks(random_blocks(name, 70, 512)), 3, dtype, device)


@pytest.mark.parametrize("name", ["Q4_0", "Q5_0", "Q5_1"])
def test_blocks_that_fill_no_tile(name: str, device: torch.device) -> None:
    check(PackedGroups.of_blocks(random_blocks(name, 70, 480)), 3, torch.float32, device)


@pytest.mark.parametrize(("num_in", "runs"), [(128, 1), (256, 2), (300, 3), (129, 2)])
@pytest.mark.parametrize("num_rows", [3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_e4m3(
    num_in: int, runs: int, num_rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    check(fp8(70, num_in, runs), num_rows, dtype, device, has_bias=runs == 2)


@pytest.mark.parametrize("config", CONFIGS[1:], ids=str)
def test_other_tiles(
    config: triton.Config, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles with several groups, blocks and bytes of high bits, and with the end of a row."""
    monkeypatch.setattr(_packed_linear, "configs", [config])
    for name in ("Q4_K", "Q5_K", "Q6_K", "MXFP4", "Q8_0"):
        weight = PackedGroups.of_blocks(random_blocks(name, 70, 768))
        check(weight, 3, torch.float32, device)
    check(PackedGroups.of_blocks(random_blocks("Q5_1", 70, 480)), 3, torch.float32, device)
    check(integers(70, 640, 5, "zeros"), 3, torch.float32, device, splits=2)
    check(fp8(70, 300, 3), 3, torch.float32, device)


@pytest.mark.parametrize("splits", [2, 3, 5])
def test_splits_of_the_inputs(splits: int, device: torch.device) -> None:
    for weight in (integers(70, 1152, 9, "zeros"), fp8(70, 1100, 9)):
        check(weight, 5, torch.float32, device, has_bias=splits == 3, splits=splits)


def test_splits_are_as_many_as_the_multiprocessors_need() -> None:
    assert choose_splits(1, 4096, 4096, 132) == 4
    assert choose_splits(1, 4096, 1024, 132) == 2  # of 512 inputs
    assert choose_splits(1, 128256, 4096, 132) == 1
    assert choose_splits(128, 4096, 4096, 132) == 4
    assert choose_splits(129, 4096, 4096, 132) == 1


def test_formats_that_the_kernel_reads() -> None:
    def weight(form: Form, num_in: int, size: int, **more: torch.Tensor) -> PackedWeight:
        return PackedWeight(form, torch.empty(1, num_in), size, **more)

    values = torch.empty(1, 1)
    assert all(can_multiply(weight("int4", 512, size)) for size in (0, 16, 32, 128))
    assert can_multiply(weight("int4", 512, 32, zeros=values))
    assert not can_multiply(weight("int4", 512, 16, zeros=values))
    assert not can_multiply(weight("int6", 512, 16, mins=values))
    assert not can_multiply(weight("int4", 44, 0))  # 88 inputs
    assert can_multiply(weight("int8", 88, 0))
    assert can_multiply(weight("int8", 1024, 16, zeros=values))
    assert not can_multiply(weight("int8", 96, 48))
    assert can_multiply(weight("e4m3", 300, 128))
    # Numbers of 4 bits take a byte each if the inputs do not divide into blocks.
    assert integers(8, 88, 1, "zeros").data.dtype == torch.int8

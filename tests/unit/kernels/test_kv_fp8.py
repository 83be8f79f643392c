from __future__ import annotations

import pytest
import torch

from tandem_kernels.kv_fp8 import quantize, widen

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def rows_of(magnitude: float) -> torch.Tensor:
    return torch.randn(200, 48, generator=torch.Generator().manual_seed(4)) * magnitude


@pytest.mark.parametrize("magnitude", [1e-6, 1e-4, 3e-3, 1.0, 50.0, 1e5, 1e6])
def test_a_number_is_the_nearest_and_the_scale_is_the_least_that_holds_the_row(
    magnitude: float,
) -> None:
    rows = rows_of(magnitude)
    numbers, scales = quantize(rows)
    wide = scales.double()
    assert bool((448 * wide >= rows.abs().amax(1).double() * (1 - 1e-7)).all())
    below = (scales.view(torch.int16) - 1).view(torch.float16).double()
    assert bool((448 * below < rows.abs().amax(1).double()).all())
    error = (widen(numbers, scales).double() - rows.double()).abs()
    finite = E4M3[E4M3.isfinite()].double()
    least = (finite * wide.view(-1, 1, 1) - rows.double().unsqueeze(2)).abs().amin(2)
    assert bool((error <= least + 1e-6 * rows.double().abs()).all())


def test_ties_go_to_even_and_small_numbers_are_multiples_of_a_512th() -> None:
    row = torch.tensor([[448.0, 17.0, 19.0, -17.0, 2.5 / 512, 1.5 / 512, -0.4 / 512, 0.015625]])
    numbers, scales = quantize(row)
    assert scales.tolist() == [1.0]
    assert widen(numbers, scales).tolist() == [
        [448.0, 16.0, 20.0, -16.0, 2 / 512, 2 / 512, -0.0, 0.015625]
    ]


def test_zeros_numbers_too_large_and_numbers_that_are_not_finite() -> None:
    rows = torch.zeros(4, 16)
    rows[1, 3], rows[2, 3], rows[3, 3] = -1e30, torch.inf, torch.nan
    rows[:, 5] = torch.tensor([-0.0, 1e30, 1.0, 1.0])
    numbers, scales = quantize(rows)
    assert scales[:2].tolist() == [0.0, 65504.0]
    assert bool(scales[2:].isnan().all())
    assert E4M3[numbers[1, [3, 5]].long()].tolist() == [-448, 448]
    assert not numbers[[0, 2, 3]].any()


def test_a_rows_bytes_depend_on_nothing_else() -> None:
    rows = rows_of(1.0)
    numbers, scales = quantize(rows)
    for i in (0, 7, 199):
        alone = quantize(rows[i])
        assert torch.equal(alone[0], numbers[i])
        assert torch.equal(alone[1], scales[i])


def test_what_is_read_is_exact_in_fp32_and_a_float16_with_the_bits_moved_up() -> None:
    numbers, scales = quantize(rows_of(3.0))
    bits = numbers.short()
    halves = ((bits & 0x7F) << 7 | (bits & 0x80) << 8).view(torch.float16)
    exact = 256 * halves.double() * scales.double().unsqueeze(1)
    assert torch.equal(widen(numbers, scales).double(), exact)

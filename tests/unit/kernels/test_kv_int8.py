from __future__ import annotations

import pytest
import torch

from tandem_kernels.kv_int8 import quantize, widen


def rows_of(magnitude: float) -> torch.Tensor:
    return torch.randn(200, 48, generator=torch.Generator().manual_seed(4)) * magnitude


@pytest.mark.parametrize("magnitude", [1e-6, 1e-4, 3e-3, 1.0, 50.0, 1e5, 1e6])
def test_a_number_is_within_half_a_step_and_the_scale_is_the_least_that_holds_the_row(
    magnitude: float,
) -> None:
    rows = rows_of(magnitude)
    numbers, scales = quantize(rows)
    wide = scales.double()
    assert numbers.abs().max() <= 127
    assert bool((127 * wide >= rows.abs().amax(1).double() * (1 - 1e-7)).all())
    below = (scales.view(torch.int16) - 1).view(torch.float16).double()
    assert bool((127 * below < rows.abs().amax(1).double()).all())
    error = (widen(numbers, scales).double() - rows.double()).abs()
    assert bool((error <= wide.unsqueeze(1) * (0.5 + 1e-5)).all())


def test_ties_go_to_even() -> None:
    numbers, scales = quantize(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]]))
    assert scales.tolist() == [1.0]
    assert numbers.tolist() == [[127, 0, 2, 2, 0, -2]]


def test_zeros_numbers_too_large_and_numbers_that_are_not_finite() -> None:
    rows = torch.zeros(4, 16)
    rows[1, 3], rows[2, 3], rows[3, 3] = -1e30, torch.inf, torch.nan
    rows[:, 5] = torch.tensor([0.0, 1e30, 1.0, 1.0])
    numbers, scales = quantize(rows)
    assert scales[:2].tolist() == [0.0, 65504.0]
    assert bool(scales[2:].isnan().all())
    assert numbers[1, [3, 5]].tolist() == [-127, 127]
    assert not numbers[[0, 2, 3]].any()


def test_a_rows_bytes_depend_on_nothing_else() -> None:
    rows = rows_of(1.0)
    numbers, scales = quantize(rows)
    for i in (0, 7, 199):
        alone = quantize(rows[i])
        assert torch.equal(alone[0], numbers[i])
        assert torch.equal(alone[1], scales[i])


def test_what_is_read_is_exact_in_fp32() -> None:
    numbers, scales = quantize(rows_of(3.0))
    exact = numbers.double() * scales.double().unsqueeze(1)
    assert torch.equal(widen(numbers, scales).double(), exact)

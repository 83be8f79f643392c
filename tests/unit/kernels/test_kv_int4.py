from __future__ import annotations

import pytest
import torch

from tandem_kernels.kv_int4 import quantize, widen


def rows_of(magnitude: float) -> torch.Tensor:
    return torch.randn(200, 48, generator=torch.Generator().manual_seed(4)) * magnitude


@pytest.mark.parametrize("magnitude", [1e-4, 3e-3, 1.0, 50.0, 1e5])
def test_a_number_is_within_half_a_step_and_opposite_the_largest_within_one(
    magnitude: float,
) -> None:
    rows = rows_of(magnitude)
    pairs, scales = quantize(rows)
    wide = scales.double().unsqueeze(1)
    read = widen(pairs, scales)
    assert bool(((8 * wide.abs()).squeeze(1) >= rows.abs().amax(1) * (1 - 1e-7)).all())
    error = (read.double() - rows.double()).abs()
    is_opposite = rows / scales.float().unsqueeze(1) > 7.5  # would be 8
    assert bool((error <= wide.abs() * torch.where(is_opposite, 1.0, 0.5 + 1e-5)).all())
    assert 0 < is_opposite.sum() < 100


def test_pairs_ties_and_the_sign_of_the_scale() -> None:
    rows = torch.tensor([[-8.0, 0.5, 1.5, 2.5, 7.0, 7.9], [8.0, 0.5, 1.5, -2.5, -7.0, -7.9]])
    pairs, scales = quantize(rows)
    assert scales.tolist() == [1.0, -1.0]
    numbers = [[-8, 0, 2, 2, 7, 7], [-8, 0, -2, 2, 7, 7]]
    assert pairs.tolist() == [
        [row[i] + 8 | (row[i + 3] + 8) << 4 for i in range(3)] for row in numbers
    ]
    assert widen(pairs, scales).tolist() == [[-8, 0, 2, 2, 7, 7], [8, 0, 2, -2, -7, -7]]


def test_of_a_number_and_its_negative_the_negative_is_exact() -> None:
    pairs, scales = quantize(torch.tensor([[8.0, -8.0]]))
    assert widen(pairs, scales).tolist() == [[7.0, -8.0]]


def test_zeros_numbers_too_large_and_numbers_that_are_not_finite() -> None:
    rows = torch.zeros(4, 16)
    rows[1, 3], rows[2, 3], rows[3, 3] = -1e30, torch.inf, torch.nan
    rows[:, 5] = torch.tensor([0.0, 1e30, 1.0, 1.0])
    pairs, scales = quantize(rows)
    assert scales[:2].tolist() == [0.0, 65504.0]
    assert bool(scales[2:].isnan().all())
    assert not widen(pairs, torch.ones(4))[[0, 2, 3]].any()
    assert widen(pairs[1:2], scales[1:2])[0, [3, 5]].tolist() == [-8 * 65504.0, 7 * 65504.0]


def test_a_rows_bytes_depend_on_nothing_else() -> None:
    rows = rows_of(1.0)
    pairs, scales = quantize(rows)
    for i in (0, 7, 199):
        alone = quantize(rows[i])
        assert torch.equal(alone[0], pairs[i])
        assert torch.equal(alone[1], scales[i])

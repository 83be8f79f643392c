from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tandem_kernels.linear import (
    TILE_ROWS,
    linear,
    linear_invariant,
    linear_of_heads,
    linear_of_heads_invariant,
)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("product", [linear, linear_invariant])
@pytest.mark.parametrize("with_bias", [False, True])
def test_fills_columns_of_a_wider_tensor(product: type, with_bias: bool) -> None:
    x, weight = torch.randn(32, 40), torch.randn(24, 40)
    bias = torch.randn(24) if with_bias else None
    expected = x @ weight.t() + (bias if bias is not None else 0)
    out = torch.full((32, 30), 9.0)
    product(x, weight, bias, out=out[:, 3:27])
    torch.testing.assert_close(product(x, weight, bias), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out[:, 3:27], expected, rtol=1e-4, atol=1e-4)
    assert bool((out[:, :3] == 9.0).all())
    assert bool((out[:, 27:] == 9.0).all())


@pytest.mark.parametrize(("num_in", "num_out"), [(576, 192), (1536, 576), (47, 203)])
def test_a_rows_bits_do_not_depend_on_its_neighbours_place_or_threads(
    num_in: int, num_out: int
) -> None:
    x, weight = torch.randn(96, num_in), torch.randn(num_out, num_in)
    together = linear_invariant(x, weight)
    shuffled = torch.randperm(96)
    torch.set_num_threads(2)
    assert torch.equal(linear_invariant(x[shuffled], weight), together[shuffled])
    torch.set_num_threads(1)
    for row in (0, 17, 95):
        alone = torch.zeros(TILE_ROWS, num_in)
        alone[5] = x[row]
        assert torch.equal(linear_invariant(alone, weight)[5], together[row])


@pytest.mark.parametrize(
    ("num_in", "num_out"), [(576, 192), (1536, 576), (4096, 203), (47, 203), (1536, 20)]
)
def test_an_outputs_bits_do_not_depend_on_the_other_outputs(num_in: int, num_out: int) -> None:
    """A rank has some consecutive rows of a matrix, and perhaps another number of threads."""
    x, weight = torch.randn(32, num_in), torch.randn(num_out, num_in)
    whole = linear_invariant(x, weight)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for num_ranks in (2, 3, 4):
            for rank in range(num_ranks):
                own = slice(num_out * rank // num_ranks, num_out * (rank + 1) // num_ranks)
                assert torch.equal(linear_invariant(x, weight[own]), whole[:, own])


def test_each_head_has_a_matrix_of_its_own() -> None:
    x, weight = torch.randn(48, 3, 20), torch.randn(3, 12, 20)
    together = linear_of_heads_invariant(x, weight)
    for product in (linear_of_heads(x, weight), together):
        for head in range(3):
            expected = x[:, head] @ weight[head].t()
            torch.testing.assert_close(product[:, head], expected, rtol=1e-4, atol=1e-4)
    shuffled = torch.randperm(48)
    assert torch.equal(linear_of_heads_invariant(x[shuffled], weight), together[shuffled])

"""The choice of experts, against the torch reference."""

from __future__ import annotations

import pytest
import torch

from tandem_kernels import experts
from tandem_kernels.triton.expert_choice import choose_experts


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("is_normalized", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (7, 3), (32, 4), (200, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_softmax(
    num_experts: int, top_k: int, is_normalized: bool, dtype: torch.dtype, device: torch.device
) -> None:
    logits = torch.stack([torch.randperm(num_experts, generator=GENERATOR) for _ in range(5)])
    logits = (logits / 8).to(device, dtype)  # no two are equal, also in bfloat16
    chosen, shares = choose_experts(logits, top_k, is_normalized=is_normalized)
    wanted, of_wanted = experts.choose_experts(logits, top_k, is_normalized)
    assert torch.equal(chosen.long(), wanted)
    torch.testing.assert_close(shares, of_wanted, rtol=1e-5, atol=1e-6)


GENERATOR = torch.Generator().manual_seed(0)


@pytest.mark.parametrize("has_sigmoids", [True, False])
@pytest.mark.parametrize("is_corrected", [True, False])
@pytest.mark.parametrize("is_normalized", [True, False])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "groups"),
    [(12, 3, (3, 2)), (12, 3, None), (64, 6, (8, 3)), (40, 4, (4, 1)), (16, 4, (4, 4))],
)
def test_groups_and_correction(
    num_experts: int,
    top_k: int,
    groups: tuple[int, int] | None,
    is_normalized: bool,
    is_corrected: bool,
    has_sigmoids: bool,
    device: torch.device,
) -> None:
    logits = randn(9, num_experts + 3, seed=1).to(device)[:, :num_experts]
    correction = randn(num_experts, seed=2).to(device) if is_corrected else None
    chosen, shares, wanted, of_wanted = (
        part
        for choose in (choose_experts, experts.choose_in_groups)
        for part in choose(
            logits,
            top_k,
            is_normalized=is_normalized,
            groups=groups,
            scale=2.5,
            has_sigmoids=has_sigmoids,
            correction=correction,
        )
    )
    assert torch.equal(chosen.long(), wanted)
    torch.testing.assert_close(shares, of_wanted, rtol=1e-5, atol=1e-6)


def test_equal_ranks_and_numbers_that_are_none(device: torch.device) -> None:
    logits = torch.zeros(2, 6, device=device)
    logits[1] = float("nan")
    chosen, _ = choose_experts(logits, 3, is_normalized=True)
    assert chosen[0].tolist() == [0, 1, 2]
    assert bool((chosen < 6).all())

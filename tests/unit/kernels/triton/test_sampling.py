"""Sampling without a sort draws the very tokens of the reference, which ranks them."""

from __future__ import annotations

import math
import random
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from tandem_kernels.edits import Edit
from tandem_kernels.sampling import NO_TOKEN, Draw
from tandem_kernels.sampling import sample as reference
from tandem_kernels.triton.sampling import sample, take_drawn

PLAIN = Draw(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0)


def random_logits(num_rows: int, vocab_size: int) -> torch.Tensor:
    return 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(5))


def check(logits: torch.Tensor, draws: list[Draw], device: torch.device) -> None:
    assert sample(logits.to(device), draws).tolist() == reference(logits, draws)


FILTERS: list[dict[str, float]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 1e-30},
    {"temperature": 5.0, "top_k": 100},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 9999},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.7, "min_p": 0.01},
]


def test_each_field_of_a_draw_has_a_case() -> None:
    tried = {name for filters in FILTERS for name in filters}
    assert tried == {f.name for f in fields(Draw)} - {"seed", "position", "edit"}


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters(filters: dict[str, float], device: torch.device) -> None:
    num_rows = 3
    draws = [replace(PLAIN, seed=row, position=row * 7, **filters) for row in range(num_rows)]
    check(random_logits(num_rows, 300), draws, device)


@pytest.mark.parametrize("vocab_size", [1, 2, 17, 5000])
def test_vocabularies(vocab_size: int, device: torch.device) -> None:
    draws = [replace(PLAIN, seed=seed, top_p=0.95) for seed in range(2)]
    check(random_logits(2, vocab_size), draws, device)


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"top_k": 5, "top_p": 0.7}], ids=str
)
def test_equal_logits_are_ranked_by_id(filters: dict[str, float], device: torch.device) -> None:
    logits = torch.tensor([0.0, -0.0, 1.0, 1.0, 0.0, 1.0, -3.0, 0.0]).repeat(3, 1)
    check(logits, [replace(PLAIN, seed=seed, **filters) for seed in range(3)], device)


def test_hidden_tokens_are_never_drawn(device: torch.device) -> None:
    logits = random_logits(3, 300)
    logits[:, ::2] = float("-inf")
    check(logits, [replace(PLAIN, temperature=4.0, seed=seed) for seed in range(3)], device)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_with_a_nan_or_an_infinity_has_no_token(
    temperature: float, device: torch.device
) -> None:
    draw = replace(PLAIN, temperature=temperature, top_k=3, top_p=0.9)
    logits = random_logits(6, 40)
    logits[0, 7] = math.nan
    logits[1, [0, 39]] = torch.tensor([0xFFC00000 - (1 << 32)], dtype=torch.int32).view(torch.float)
    logits[2, 0] = math.inf
    logits[3] = -math.inf
    logits[4, 1:] = -math.inf
    check(logits, [draw] * 6, device)
    assert sample(logits[:5].to(device), [draw] * 5).tolist() == [*[NO_TOKEN] * 4, 0]
    # Edits of a row do not hide that the model has computed a NaN.
    none = np.zeros(0, np.float32)
    banned = Edit(none.astype(np.int32), none, none, none, banned=[0, 7, 39])
    check(logits, [replace(draw, edit=banned)] * 6, device)
    assert (
        sample(logits[:4].to(device), [replace(draw, edit=banned)] * 4).tolist() == [NO_TOKEN] * 4
    )


def test_a_step_launched_ahead_takes_token_0_in_place_of_no_token(device: torch.device) -> None:
    token_ids = torch.tensor([5, -1, -2, -3], dtype=torch.int32, device=device)
    take_drawn(token_ids, torch.tensor([NO_TOKEN, 8, 9], device=device))
    assert token_ids.tolist() == [5, 0, 8, 9]


def test_seeds_and_positions_of_64_bits(device: torch.device) -> None:
    seeds = [0, 1, 2**31, 2**32 + 5, 2**63, 2**64 - 1]
    draws = [replace(PLAIN, seed=seed, position=2**33 + i) for i, seed in enumerate(seeds)]
    check(random_logits(len(draws), 500), draws, device)


def test_rows_of_different_kinds_and_of_a_wider_tensor(device: torch.device) -> None:
    kinds = [PLAIN, replace(PLAIN, temperature=0.0), replace(PLAIN, top_k=2)]
    wide = random_logits(3, 250).to(device)
    narrow = wide[:, :203]
    assert sample(narrow, kinds).tolist() == reference(narrow.cpu(), kinds)


@pytest.mark.slow
def test_many_draws(device: torch.device) -> None:
    choose = random.Random(0)
    draws = [
        Draw(
            temperature=choose.choice([0.0, 0.2, 0.7, 1.0, 3.0]),
            top_k=choose.choice([0, 1, 20, 500]),
            top_p=choose.choice([1.0, 0.99, 0.9, 0.3]),
            min_p=choose.choice([0.0, 0.001, 0.1]),
            seed=choose.getrandbits(64),
            position=choose.getrandbits(20),
        )
        for _ in range(500)
    ]
    check(random_logits(len(draws), 20_000), draws, device)

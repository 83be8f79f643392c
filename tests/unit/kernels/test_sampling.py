"""Sampling: the distribution, the filters against their plain definition, independence."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_kernels.native.library import load
from tandem_kernels.philox import uniform
from tandem_kernels.sampling import NO_TOKEN, Draw
from tandem_kernels.sampling import sample as sample_in_numpy

Sample = Callable[[torch.Tensor, Sequence[Draw]], list[int]]

LIBRARY = load()
assert LIBRARY is not None
INSTRUCTIONS = ("plain", "avx2", "avx512", "avx512_bf16", "amx")
PLAIN = Draw(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0)


@pytest.fixture(scope="module", params=["numpy", *filter(LIBRARY.instructions, INSTRUCTIONS)])
def sample(request: pytest.FixtureRequest) -> Sample:
    """How tokens are sampled: by numpy, or by native kernels with one set of instructions."""
    if request.param == "numpy":
        return sample_in_numpy
    assert LIBRARY is not None
    draw_rows = partial(LIBRARY.draw, num_threads=2, instructions=request.param)
    return partial(sample_in_numpy, draw_rows=draw_rows)


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def kept_probabilities(logits: torch.Tensor, draw: Draw) -> dict[int, float]:
    """Returns the tokens that may be drawn, most likely first: min_p, then top_k, then top_p, by
    their definition."""
    scaled = logits.double() / draw.temperature
    probabilities = torch.softmax(scaled, 0).tolist()
    ranked = sorted(range(len(probabilities)), key=lambda i: (-float(logits[i]), i))
    ranked = [i for i in ranked if probabilities[i] >= draw.min_p * probabilities[ranked[0]]]
    ranked = ranked[: draw.top_k or None]
    mass = math.fsum(probabilities[i] for i in ranked)
    kept: dict[int, float] = {}
    for i in ranked:
        if math.fsum(kept.values()) >= draw.top_p * mass:
            break
        kept[i] = probabilities[i]
    total = math.fsum(kept.values())
    return {i: p / total for i, p in kept.items()}


def test_temperature_0_takes_the_first_of_the_largest(sample: Sample) -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [1.0, 0.0, -1.0]])
    greedy = replace(PLAIN, temperature=0.0)
    assert sample(logits, [greedy, replace(greedy, seed=9)]) == [1, 0]


@pytest.mark.parametrize(
    "draw", [PLAIN, replace(PLAIN, temperature=0.0), replace(PLAIN, top_p=0.5, top_k=3, min_p=0.1)]
)
def test_a_row_with_a_nan_or_an_infinity_has_no_token(sample: Sample, draw: Draw) -> None:
    logits = random_logits(5, 40)
    logits[0, 7] = logits[0, 11] = math.nan
    logits[1, 0] = math.inf
    logits[2] = -math.inf
    logits[3, 1:] = -math.inf  # tokens that the model itself excludes
    tokens = sample(logits, [draw] * 5)
    assert tokens[:4] == [NO_TOKEN, NO_TOKEN, NO_TOKEN, 0]
    assert tokens[4] >= 0


@settings(max_examples=150, deadline=None)
@given(
    logits_seed=st.integers(0, 1000),
    vocab_size=st.sampled_from([2, 50, 3000]),
    temperature=st.sampled_from([0.3, 1.0, 4.0]),
    top_k=st.sampled_from([0, 1, 7, 400, 5000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3, 1e-6]),
    min_p=st.sampled_from([0.0, 1e-3, 0.2, 1.0]),
    position=st.integers(0, 10**6),
)
def test_the_token_is_where_the_uniform_number_falls(
    sample: Sample,
    logits_seed: int,
    vocab_size: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    position: int,
) -> None:
    logits = random_logits(1, vocab_size, logits_seed)
    draw = Draw(temperature, top_k, top_p, min_p, seed=logits_seed, position=position)
    kept = kept_probabilities(logits[0], draw)
    u = uniform(draw.seed, draw.position)
    edges = np.cumsum(list(kept.values()))
    near = [u - 1e-5, u, u + 1e-5]  # fp32 weights move an edge by less
    possible = {list(kept)[min(int(np.searchsorted(edges, x)), len(kept) - 1)] for x in near}
    assert sample(logits, [draw])[0] in possible


def test_ties_are_ranked_by_token_id(sample: Sample) -> None:
    logits = torch.zeros(1, 1000)
    drawn = {
        sample(logits, [replace(PLAIN, top_k=3, position=position)])[0] for position in range(60)
    }
    assert drawn == {0, 1, 2}


@pytest.mark.parametrize("draw", [PLAIN, replace(PLAIN, temperature=3.0, top_k=8, top_p=0.9)])
def test_frequencies_are_the_probabilities(sample: Sample, draw: Draw) -> None:
    """Chi-square over 20,000 positions, against the 99.99% quantile (Wilson-Hilferty)."""
    num_draws = 20_000
    logits = random_logits(1, 12)
    expected = kept_probabilities(logits[0], draw)
    draws = [replace(draw, position=position) for position in range(num_draws)]
    tokens = torch.tensor(sample(logits.expand(num_draws, -1), draws))
    counts = torch.bincount(tokens, minlength=12).tolist()
    assert {i for i, count in enumerate(counts) if count} <= expected.keys()
    chi_square = sum(
        (counts[i] - num_draws * p) ** 2 / (num_draws * p) for i, p in expected.items()
    )
    freedom = len(expected) - 1
    quantile = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < quantile


def test_seeds_are_independent(sample: Sample) -> None:
    """Neighbouring seeds at one position draw as uniformly as neighbouring positions do."""
    logits = torch.zeros(1, 4)
    draws = [replace(PLAIN, seed=seed) for seed in range(4000)]
    tokens = torch.tensor(sample(logits.expand(4000, -1), draws))
    assert torch.bincount(tokens).sub(1000).abs().max() < 150


def test_a_row_does_not_depend_on_the_others(sample: Sample) -> None:
    logits = random_logits(9, 5000, seed=3)
    kinds = [
        replace(PLAIN, temperature=3.0),
        replace(PLAIN, temperature=0.0),
        replace(PLAIN, temperature=2.0, top_p=0.95),
        replace(PLAIN, top_k=40, min_p=0.01),
    ]
    draws = [replace(kinds[i % 4], seed=i, position=100 + i) for i in range(9)]
    together = sample(logits, draws)
    for i in range(9):
        assert sample(logits[i : i + 1], draws[i : i + 1]) == [together[i]]
    order = [4, 0, 8, 2]
    assert sample(logits[order], [draws[i] for i in order]) == [together[i] for i in order]


def test_hidden_tokens_and_tiny_temperatures(sample: Sample) -> None:
    logits = torch.full((1, 600), float("-inf"))
    logits[0, [5, 599]] = torch.tensor([1.0, 1.5])
    drawn = {sample(logits, [replace(PLAIN, seed=seed)])[0] for seed in range(40)}
    assert drawn == {5, 599}
    assert sample(logits, [replace(PLAIN, temperature=1e-38)]) == [599]


def test_an_instruction_set_that_is_not_available_is_refused() -> None:
    assert LIBRARY is not None
    with pytest.raises(ValueError, match="lacks the instruction set"):
        LIBRARY.draw([np.zeros(5, np.float32)], [PLAIN], 1, instructions="none")

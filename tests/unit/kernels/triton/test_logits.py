"""Edits and log probabilities on the device have the bits, or nearly, of the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem_kernels.edits import Edit, apply_edit
from tandem_kernels.logprobs import logprobs as reference
from tandem_kernels.triton.edits import edited
from tandem_kernels.triton.logprobs import logprobs
from tests.unit.kernels.test_logits import assert_alike, edits, random_logits


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(asked=st.lists(st.none() | edits(), min_size=3, max_size=3), seed=st.integers(0, 9))
def test_edits_have_the_reference_bits(
    asked: list[Edit | None], seed: int, device: torch.device
) -> None:
    logits = random_logits(seed)
    before = logits.clone()
    expected = logits.clone().numpy()
    for row, edit in zip(expected, asked, strict=True):
        if edit is not None:
            apply_edit(row, edit)
    found = edited(logits.to(device), asked).cpu().numpy()
    assert found.tobytes() == expected.tobytes()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab", [1, 5, 300, 5000])
def test_logprobs_are_the_reference(vocab: int, device: torch.device) -> None:
    for seed, num_top in enumerate((0, 3)):
        logits = random_logits(seed, 4, vocab)
        if vocab > 4500:
            logits[1, :4096] = float("-inf")  # a whole tile
        rows, token_ids = [3, 1, 1], [vocab - 1, vocab - 1, vocab // 2]
        wide = torch.nn.functional.pad(logits, (0, 7)).to(device)[:, :vocab]
        found = logprobs(wide, rows, token_ids, num_top)
        assert_alike(found, reference(logits, rows, token_ids, num_top))
        np.testing.assert_array_equal(found.top_ids.shape, (3, min(num_top, vocab)))

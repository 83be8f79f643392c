"""Edits and log probabilities: the reference by its formulas, the backends by the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_kernels.edits import Edit, apply_edit, edited_logits
from tandem_kernels.logprobs import Logprobs, logprobs
from tandem_kernels.native.library import Library, Model, load
from tandem_kernels.sampling import Draw, sample

VOCAB = 1203  # no multiple of a panel or a tile
INSTRUCTIONS = ("plain", "avx2", "avx512", "avx512_bf16", "amx")


def random_logits(seed: int, num_rows: int = 3, vocab: int = VOCAB) -> torch.Tensor:
    """Returns logits with equals among them, so that ranks have ties."""
    rows = 3 * torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed))
    return (rows * 8).round() / 8


@st.composite
def edits(draw: st.DrawFn, vocab: int = VOCAB) -> Edit:
    """Draws an edit of up to 40 tokens, some of them banned, too, and maybe a mask."""
    ids = st.integers(0, vocab - 1)
    token_ids = draw(st.lists(ids, max_size=40, unique=True))
    column: Any = lambda low, high: np.array(  # noqa: E731
        [draw(st.floats(low, high, width=32)) for _ in token_ids], np.float32
    )
    banned = draw(st.lists(ids | st.sampled_from(token_ids or [0]), max_size=5))
    columns = column(-100, 100), column(0.125, 8), column(-4, 4)
    mask = draw(st.none() | st.integers(0, 9).map(lambda seed: random_mask(seed, vocab)))
    return Edit(np.array(token_ids, np.int32), *columns, banned, mask)


def random_mask(seed: int, vocab: int = VOCAB) -> Any:
    """Returns a packed mask; with seed 0 it allows a single token, the last."""
    allowed = np.random.default_rng(seed).random(vocab) < seed / 10
    allowed[-1] = True
    bits = np.zeros(-(-vocab // 32) * 32, bool)
    bits[:vocab] = allowed
    return np.packbits(bits, bitorder="little").view(np.int32)


@settings(max_examples=60, deadline=None)
@given(edit=edits(), seed=st.integers(0, 9))
def test_an_edit_rounds_after_each_operation(edit: Edit, seed: int) -> None:
    """Computes each token by itself in double precision, rounded after each operation."""
    row = random_logits(seed, 1)[0].numpy()
    expected = row.copy()
    columns = (edit.token_ids, edit.bias, edit.scales, edit.penalties)
    for token_id, bias, scale, penalty in zip(*columns, strict=True):
        value = np.float32(float(row[token_id]) + float(bias))
        scaled = float(value) / float(scale) if value > 0 else float(value) * float(scale)
        expected[token_id] = np.float32(float(np.float32(scaled)) - float(penalty))
    expected[list(edit.banned)] = -np.inf
    if edit.mask is not None:
        for token_id in range(VOCAB):
            if not int(edit.mask[token_id // 32]) >> token_id % 32 & 1:
                expected[token_id] = -np.inf
    apply_edit(row, edit)
    assert row.tobytes() == expected.tobytes()


@settings(max_examples=60, deadline=None)
@given(edit=edits(), seed=st.integers(0, 9), num_left=st.integers(1, VOCAB))
def test_what_an_edit_leaves_is_the_edited_row(edit: Edit, seed: int, num_left: int) -> None:
    """A mask that leaves few tokens has a way of its own, and so has the most likely token."""
    row = random_logits(seed, 1)
    if edit.mask is not None:
        bits = np.zeros(32 * len(edit.mask), np.uint8)
        bits[np.random.default_rng(seed).permutation(VOCAB)[:num_left]] = 1
        edit = replace(edit, mask=np.packbits(bits, bitorder="little").view(np.int32))
    edited = row[0].numpy().copy()
    apply_edit(edited, edit)
    values, ids = edited_logits(row[0].numpy(), edit)
    if ids is None:
        assert values.tobytes() == edited.tobytes()
    else:
        assert values.tobytes() == edited[ids].tobytes()
        assert np.isneginf(np.delete(edited, ids)).all()
    if np.isfinite(edited).any():
        greedy = Draw(0.0, 0, 1.0, 0.0, 1, 1, edit)
        assert sample(row, [greedy]) == [int(edited.argmax())]


@pytest.mark.parametrize("seed", range(10))
def test_a_greedy_draw_is_the_most_likely_token_that_the_mask_allows(seed: int) -> None:
    logits = random_logits(seed, 8)
    none = np.zeros(0, np.int32), *([np.zeros(0, np.float32)] * 3)
    edit = Edit(*none, (), random_mask(seed))
    expected = logits.clone().numpy()
    for row in expected:
        apply_edit(row, edit)
    found = sample(logits, [Draw(0.0, 0, 1.0, 0.0, 1, 1, edit)] * 8)
    assert found == expected.argmax(-1).tolist()


def test_a_draw_sees_the_edit_and_the_logits_stay() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.0]])
    before = logits.clone()
    none = np.zeros(0, np.float32)
    ban = Edit(np.zeros(0, np.int32), none, none, none, banned=[2])
    greedy = Draw(temperature=0, top_k=0, top_p=1, min_p=0, seed=0, position=0, edit=ban)
    assert sample(logits, [greedy]) == [1]
    drawn = {
        sample(logits, [Draw(1.0, 0, 1.0, 0.0, seed=seed, position=0, edit=ban)])[0]
        for seed in range(50)
    }
    assert drawn == {0, 1, 3}
    assert torch.equal(logits, before)


def assert_alike(found: Logprobs, expected: Logprobs) -> None:
    assert found.ranks.tolist() == expected.ranks.tolist()
    assert found.top_ids.tolist() == expected.top_ids.tolist()
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=3e-6)
    np.testing.assert_allclose(found.top_logprobs, expected.top_logprobs, atol=3e-6)


def test_the_reference_by_its_formula() -> None:
    logits = random_logits(3)
    found = logprobs(logits, [2, 0], [7, 9], 5)
    for index, (row, token_id) in enumerate([(2, 7), (0, 9)]):
        expected = torch.log_softmax(logits[row].double(), -1)
        assert found.logprobs[index] == pytest.approx(float(expected[token_id]), abs=1e-6)
        assert found.ranks[index] == 1 + int((expected > expected[token_id]).sum())
        ranked = sorted(range(VOCAB), key=lambda i: (-float(logits[row, i]), i))
        assert found.top_ids[index].tolist() == ranked[:5]
        np.testing.assert_allclose(found.top_logprobs[index], expected[ranked[:5]], atol=1e-6)


def native_logprobs(
    logits: torch.Tensor, rows: list[int], token_ids: list[int], num_top: int, wanted: str
) -> Logprobs:
    """Measures by the native kernels; a decoder without layers knows its vocabulary."""
    library = load()
    assert isinstance(library, Library)
    decoder = library.create(Model(vocab=logits.shape[1], num_threads=2), wanted)
    try:
        chosen = np.array(rows, np.int32), np.array(token_ids, np.int32)
        return library.measure(decoder, logits.data_ptr(), *chosen, min(num_top, logits.shape[1]))
    finally:
        library.destroy(decoder)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("vocab", [1, 5, 16, 513, VOCAB])
def test_native_kernels_measure_as_the_reference(instructions: str, vocab: int) -> None:
    library = load()
    if library is None or library.instructions(instructions) is None:
        pytest.skip(f"this machine has no {instructions}")
    for seed, num_top in enumerate((0, 1, 5, 20)):
        logits = random_logits(seed, 5, vocab)
        if vocab > 3:
            logits[1, 1::2] = float("-inf")
        rows, token_ids = [4, 1, 0, 1], [vocab - 1, 0, vocab // 2, 0]
        found = native_logprobs(logits, rows, token_ids, num_top, instructions)
        assert_alike(found, logprobs(logits, rows, token_ids, num_top))

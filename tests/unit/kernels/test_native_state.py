"""The C++ kernels of layers with a state, against torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from tandem_kernels import linear_attention
from tandem_kernels.causal_conv import causal_conv1d
from tandem_kernels.linear_attention import StateSpan
from tandem_kernels.native import library
from tandem_kernels.native.state import StateKernels
from tests.unit.kernels.state_cases import (
    NUM_ROWS,
    NUM_SLOTS,
    SPANS,
    UNNAMED,
    DeltaCase,
    Mamba2Case,
    cut,
)

LIBRARY = library.load()
assert LIBRARY is not None
SETS = [
    name for name in ("amx", "avx512_bf16", "avx512", "avx2", "plain") if LIBRARY.instructions(name)
]
# Shapes with whole and partial blocks of columns; heads of 16 numbers are the smallest.
SHAPES: dict[str, Any] = {
    "delta": DeltaCase(k_heads=2, v_heads=4, d_k=128, d_v=128),
    "delta, partial": DeltaCase(k_heads=1, v_heads=3, d_k=20, d_v=80),
    "delta, small": DeltaCase(k_heads=2, v_heads=2, d_k=16, d_v=16),
    "kimi": DeltaCase(k_heads=2, v_heads=2, d_k=128, d_v=128, by_channel=True),
    "kimi, partial": DeltaCase(k_heads=3, v_heads=3, d_k=20, d_v=80, by_channel=True),
    "mamba2": Mamba2Case(groups=1, heads=3, d_state=128, head_dim=64),
    "mamba2, partial": Mamba2Case(groups=2, heads=4, d_state=24, head_dim=48),
}


def kernels(instructions: str, num_threads: int = 1) -> StateKernels:
    assert LIBRARY is not None
    return StateKernels(LIBRARY, num_threads, instructions)


def computed(
    native: StateKernels, case: Any, states: torch.Tensor, spans: Sequence[StateSpan]
) -> torch.Tensor:
    if isinstance(case, DeltaCase):
        gates = (case.a, case.b, case.a_log, case.dt_bias)
        return native.gated_delta_rule(case.q, case.k, case.v, *gates, states, spans)
    return native.mamba2(*case.inputs, states, spans)


def expected(case: Any, states: torch.Tensor, spans: Sequence[StateSpan]) -> torch.Tensor:
    form: Callable[..., torch.Tensor] = (
        linear_attention.gated_delta_rule_recurrent
        if isinstance(case, DeltaCase)
        else linear_attention.mamba2_recurrent
    )
    return form(*case.inputs, states, spans)


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_scan_equals_torch(shape: str, instructions: str) -> None:
    case = SHAPES[shape]
    ours, theirs = case.states.clone(), case.states.clone()
    y = computed(kernels(instructions), case, ours, SPANS)
    expected_y = expected(case, theirs, SPANS)
    for span in SPANS:
        rows = slice(span.first_row, span.first_row + span.num_rows)
        torch.testing.assert_close(y[rows], expected_y[rows], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours[span.slot], theirs[span.slot], rtol=1e-5, atol=1e-5)
    assert torch.equal(ours[list(UNNAMED)], case.states[list(UNNAMED)])


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("shape", ["delta", "kimi", "mamba2"])
def test_bits_of_a_scan_depend_on_its_sequence_alone(shape: str, instructions: str) -> None:
    """Not on threads, on the cuts of a prompt, on the batch, or on the place of the state."""
    case = SHAPES[shape]
    states = case.states.clone()
    together = computed(kernels(instructions), case, states, SPANS)
    slots, heads, *shape = case.states.shape
    pool = torch.full((slots, heads, 3, *shape), float("nan"))
    pool[:, :, 1] = case.states
    many = computed(kernels(instructions, num_threads=3), case, pool[:, :, 1], SPANS)
    assert torch.equal(many, together)
    assert torch.equal(pool[:, :, 1], states)
    whole = computed(kernels(instructions), case, states, cut(300, ()))
    cut_states = case.states.clone()
    for span in cut(300, (1, 2, 63, 64, 100, 201)):
        part = computed(kernels(instructions, num_threads=16), case, cut_states, [span])
        rows = slice(span.first_row, span.first_row + span.num_rows)
        assert torch.equal(part[rows], whole[rows])
    assert torch.equal(cut_states[3], states[3])


@pytest.mark.parametrize("shape", SHAPES)
def test_bits_of_a_scan_do_not_depend_on_the_width_of_vectors(shape: str) -> None:
    case = SHAPES[shape]
    with_fma = [name for name in SETS if name != "plain"]
    if not with_fma:
        pytest.skip("this processor has no fused multiply-add")
    results = []
    for name in with_fma:
        states = case.states.clone()
        results.append((computed(kernels(name), case, states, SPANS), states))
    for y, states in results[1:]:
        assert torch.equal(y, results[0][0])
        assert torch.equal(states, results[0][1])


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize(("channels", "groups", "num_taps"), [(1040, 1, 4), (96, 3, 3), (20, 5, 2)])
@pytest.mark.parametrize("has_silu", [False, True])
def test_convolution_equals_torch(
    instructions: str, channels: int, groups: int, num_taps: int, has_silu: bool
) -> None:
    x, weight = torch.randn(NUM_ROWS, channels), torch.randn(channels, num_taps)
    bias = torch.randn(channels) if has_silu else None
    before = torch.randn(NUM_SLOTS, groups, num_taps - 1, channels // groups)
    ours, theirs = before.clone(), before.clone()
    native = kernels(instructions)
    y = native.causal_conv1d(x, weight, bias, ours, SPANS, has_silu=has_silu)
    expected_y = causal_conv1d(x, weight, bias, theirs, SPANS, silu if has_silu else None)
    for span in SPANS:
        rows = slice(span.first_row, span.first_row + span.num_rows)
        torch.testing.assert_close(y[rows], expected_y[rows], rtol=1e-5, atol=1e-5)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("instructions", SETS)
def test_bits_of_a_convolution_depend_on_its_sequence_alone(instructions: str) -> None:
    x, weight, bias = torch.randn(NUM_ROWS, 1040), torch.randn(1040, 4), torch.randn(1040)
    before = torch.randn(NUM_SLOTS, 1, 3, 1040)

    def convolved(states: torch.Tensor, spans: Sequence[StateSpan], threads: int) -> torch.Tensor:
        native = kernels(instructions, threads)
        return native.causal_conv1d(x, weight, bias, states, spans, has_silu=True)

    states, cut_states = before.clone(), before.clone()
    whole = convolved(states, cut(300, ()), 1)
    for span in cut(300, (1, 2, 5, 64, 299)):
        rows = slice(span.first_row, span.first_row + span.num_rows)
        assert torch.equal(convolved(cut_states, [span], 3)[rows], whole[rows])
    assert torch.equal(cut_states, states)


@pytest.mark.parametrize("instructions", SETS)
def test_value_heads_may_be_in_groups(instructions: str) -> None:
    """The heads of a projection may be ordered by k head: q, k, and then the v heads that share
    them."""
    case = SHAPES["delta"]
    num_rows, k_heads, d_k = case.k.shape
    values = case.v.view(num_rows, k_heads, -1)
    projected = torch.cat((case.q, case.k, values), 2)
    q, k, v = projected.split([d_k, d_k, values.shape[2]], 2)
    states, grouped_states = case.states.clone(), case.states.clone()
    native = kernels(instructions)
    gates = (case.a, case.b, case.a_log, case.dt_bias)
    grouped = v.view(num_rows, k_heads, 2, -1)
    y = native.gated_delta_rule(q, k, grouped, *gates, grouped_states, SPANS)
    assert torch.equal(y, native.gated_delta_rule(case.q, case.k, case.v, *gates, states, SPANS))
    assert torch.equal(grouped_states, states)


def test_an_instruction_set_that_is_not_available_is_refused() -> None:
    case = SHAPES["delta, small"]
    with pytest.raises(ValueError, match="lacks the instruction set"):
        computed(kernels("none"), case, case.states.clone(), SPANS)

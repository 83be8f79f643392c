"""The Triton kernels of layers with a state, against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from tandem_kernels import causal_conv, linear_attention, norm
from tandem_kernels.linear_attention import StateSpan, delta_gates
from tandem_kernels.triton import causal_conv as triton_conv
from tandem_kernels.triton import gated_norm
from tandem_kernels.triton import linear_attention as triton_attention
from tandem_kernels.triton.state_spans import DeviceSpans
from tests.unit.kernels.state_cases import NUM_SLOTS, DeltaCase, Mamba2Case, cut

# Rows that begin, go on at and between multiples of 64, single rows, and none.
SPANS = (
    StateSpan(first_row=1, num_rows=1, first_position=5, slot=4),
    StateSpan(first_row=2, num_rows=70, first_position=0, slot=1),
    StateSpan(first_row=72, num_rows=80, first_position=100, slot=6),
    StateSpan(first_row=152, num_rows=0, first_position=9, slot=0),
    StateSpan(first_row=152, num_rows=1, first_position=0, slot=2),
    StateSpan(first_row=153, num_rows=7, first_position=70, slot=3),
)
NUM_ROWS = 160
UNNAMED = (0, 5)
SHAPES: dict[str, Any] = {
    "delta": DeltaCase(NUM_ROWS, k_heads=1, v_heads=2, d_k=32, d_v=48),
    "delta, odd": DeltaCase(NUM_ROWS, k_heads=1, v_heads=1, d_k=24, d_v=16),
    "delta, bf16": DeltaCase(NUM_ROWS, k_heads=1, v_heads=1, d_k=32, d_v=16, dtype=torch.bfloat16),
    "mamba2": Mamba2Case(NUM_ROWS, groups=1, heads=2, d_state=32, head_dim=16),
}
FORMS = ("chunked", "recurrent")


def computed(
    case: Any, form: str, states: torch.Tensor, spans: tuple[StateSpan, ...]
) -> torch.Tensor:
    device = states.device
    on_device = DeviceSpans.of(spans, device)
    if isinstance(case, DeltaCase):
        inputs = (case.q, case.k, case.v, case.a, case.b, case.a_log, case.dt_bias)
        delta = {
            "chunked": triton_attention.gated_delta_rule,
            "recurrent": triton_attention.gated_delta_rule_recurrent,
        }[form]
        return delta(*(x.to(device) for x in inputs), states, on_device)
    mamba = {
        "chunked": triton_attention.mamba2,
        "recurrent": triton_attention.mamba2_recurrent,
    }[form]
    *tensors, limits = case.inputs
    return mamba(*(x.to(device) for x in tensors), limits, states, on_device)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_torch(shape: str, form: str, device: torch.device) -> None:
    case = SHAPES[shape]
    ours, theirs = case.states.to(device, copy=True), case.states.clone()
    y = computed(case, form, ours, SPANS).cpu()
    if isinstance(case, DeltaCase):
        gates = delta_gates(case.a, case.b, case.a_log, case.dt_bias)
        expected = linear_attention.gated_delta_rule_recurrent(
            case.q, case.k, case.v, *gates, theirs, SPANS
        )
    else:
        expected = linear_attention.mamba2_recurrent(*case.inputs, theirs, SPANS)
    tolerance = 2e-5 if y.dtype == torch.float32 else 3e-2
    for span in SPANS:
        rows = slice(span.first_row, span.first_row + span.num_rows)
        of_slot = (ours[span.slot].cpu(), theirs[span.slot])
        torch.testing.assert_close(y[rows], expected[rows], rtol=1e-4, atol=tolerance)
        torch.testing.assert_close(*of_slot, rtol=1e-4, atol=tolerance)
    assert torch.equal(ours.cpu()[list(UNNAMED)], case.states[list(UNNAMED)])


@pytest.mark.parametrize(
    ("form", "num_rows", "cuts"), [("chunked", 150, (64, 128)), ("recurrent", 70, (1, 63))]
)
def test_bits_do_not_depend_on_cuts(
    form: str, num_rows: int, cuts: tuple[int, ...], device: torch.device
) -> None:
    case = SHAPES["delta, odd"]
    states, cut_states = (case.states.to(device, copy=True) for _ in range(2))
    whole = computed(case, form, states, tuple(cut(num_rows, ())))
    for span in cut(num_rows, cuts):
        rows = slice(span.first_row, span.first_row + span.num_rows)
        assert torch.equal(computed(case, form, cut_states, (span,))[rows], whole[rows])
    assert torch.equal(cut_states, states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("channels", "groups", "num_taps"), [(200, 1, 4), (96, 3, 3)])
def test_convolution(
    dtype: torch.dtype, channels: int, groups: int, num_taps: int, device: torch.device
) -> None:
    x = torch.randn(NUM_ROWS, channels + 8).to(dtype)[:, :channels]
    weight = torch.randn(channels, num_taps).to(dtype)
    bias = torch.randn(channels).to(dtype) if groups == 1 else None
    before = torch.randn(NUM_SLOTS, groups, num_taps - 1, channels // groups).to(dtype)
    ours, theirs = before.to(device, copy=True), before.clone()
    y = triton_conv.causal_conv1d(
        x.to(device),
        weight.to(device),
        None if bias is None else bias.to(device),
        ours,
        DeviceSpans.of(SPANS, device),
        has_silu=groups == 1,
    ).cpu()
    activation = silu if groups == 1 else None
    expected = causal_conv.causal_conv1d(x, weight, bias, theirs, SPANS, activation)
    for span in SPANS:
        rows = slice(span.first_row, span.first_row + span.num_rows)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(y[rows], expected[rows], rtol=tolerance, atol=tolerance)
    assert torch.equal(ours.cpu(), theirs)


# Single rows, for which one launch convolves and updates the states.
SINGLE_SPANS = (
    StateSpan(first_row=1, num_rows=1, first_position=5, slot=4),
    StateSpan(first_row=2, num_rows=0, first_position=9, slot=0),
    StateSpan(first_row=3, num_rows=1, first_position=0, slot=2),
    StateSpan(first_row=4, num_rows=1, first_position=3, slot=6),
)


@pytest.mark.parametrize("spans", [SPANS, SINGLE_SPANS], ids=["chunks", "single"])
def test_convolution_of_sections(spans: tuple[StateSpan, ...], device: torch.device) -> None:
    """Three groups cannot share the 40 channels of the second section equally."""
    sizes, rooms = [150, 40, 27], [50, 14, 9]
    x, weight, bias = torch.randn(NUM_ROWS, 217), torch.randn(217, 4), torch.randn(217)
    before = torch.randn(NUM_SLOTS, 3, 3, sum(rooms))
    ours, theirs = before.to(device, copy=True), before.clone()
    y = triton_conv.causal_conv1d(
        x.to(device),
        weight.to(device),
        bias.to(device),
        ours,
        DeviceSpans.of(spans, device),
        has_silu=True,
        sections=[*map(triton_conv.Section, sizes, rooms)],
    ).cpu()
    parts = [torch.split(each, sizes, dim) for each, dim in ((x, 1), (weight, 0), (bias, 0))]
    states = torch.split(theirs, rooms, -1)
    convolved = [
        causal_conv.causal_conv1d(*each, spans, silu) for each in zip(*parts, states, strict=True)
    ]
    for span in spans:
        rows = slice(span.first_row, span.first_row + span.num_rows)
        torch.testing.assert_close(y[rows], torch.cat(convolved, 1)[rows], rtol=1e-5, atol=1e-5)
    # The kernels leave the room that a group does not need as it is.
    spare = 50 + 12
    assert torch.equal(ours.cpu()[:, 2, :, spare : 50 + 14], before[:, 2, :, spare : 50 + 14])
    theirs[:, 2, :, spare : 50 + 14] = before[:, 2, :, spare : 50 + 14]
    assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spans", [SPANS, SINGLE_SPANS], ids=["chunks", "single"])
def test_gated_convolution(
    spans: tuple[StateSpan, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """The numbers are small integers, so that no result is rounded."""
    projected, weight, bias, before = (
        torch.randint(-2, 3, shape).to(dtype)
        for shape in ((NUM_ROWS, 3 * 150), (150, 3), (150,), (NUM_SLOTS, 1, 2, 150))
    )
    before = before.float()
    ours, theirs = before.to(device, copy=True), before.clone()
    y = triton_conv.gated_conv1d(
        *(each.to(device) for each in (projected, weight, bias)),
        ours,
        DeviceSpans.of(spans, device),
    ).cpu()
    inputs, gates, x = projected.chunk(3, 1)
    expected = gates * causal_conv.causal_conv1d(inputs * x, weight, bias, theirs, spans, None)
    computed = [row for s in spans for row in range(s.first_row, s.first_row + s.num_rows)]
    assert torch.equal(y[computed], expected[computed])
    others = [row for row in range(NUM_ROWS) if row not in computed]
    assert not y[others].any()
    assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("form", FORMS)
def test_rates_above_1(form: str, device: torch.device) -> None:
    """Gated DeltaNet with rates of up to 2."""
    case = DeltaCase(NUM_ROWS, k_heads=1, v_heads=1, d_k=16, d_v=16)
    spans = SPANS[-2:]
    ours, theirs = case.states.to(device, copy=True), case.states.clone()
    rule = {
        "chunked": triton_attention.gated_delta_rule,
        "recurrent": triton_attention.gated_delta_rule_recurrent,
    }[form]
    inputs = (case.q, case.k, case.v, case.a, case.b, case.a_log, case.dt_bias)
    y = rule(*(x.to(device) for x in inputs), ours, DeviceSpans.of(spans, device), 2.0).cpu()
    log_decay, beta = delta_gates(case.a, case.b, case.a_log, case.dt_bias)
    expected = linear_attention.gated_delta_rule_recurrent(
        case.q, case.k, case.v, log_decay, 2.0 * beta, theirs, spans
    )
    torch.testing.assert_close(y[152:], expected[152:], rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gated_norms(dtype: torch.dtype, device: torch.device) -> None:
    x, gate = (torch.randn(5, 3, 48).to(device, dtype) for _ in range(2))
    wide = torch.randn(5, 200).to(device, dtype)[:, :144]
    head_weight, weight = (torch.randn(num).to(device, dtype) for num in (48, 144))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        gated_norm.gated_rms_norm(x, gate, head_weight, 1e-5),
        norm.gated_rms_norm(x, gate, head_weight, 1e-5),
        rtol=tolerance,
        atol=tolerance,
    )
    torch.testing.assert_close(
        gated_norm.rms_norm_of_gated(x.flatten(1), wide, weight, 1e-5, 48),
        norm.rms_norm_of_gated(x.flatten(1), wide, weight, 1e-5, 48),
        rtol=tolerance,
        atol=tolerance,
    )
    torch.testing.assert_close(
        gated_norm.rms_norm_of_gated(x.flatten(1), wide, None, 1e-5, 48, factor=0.3),
        (x.flatten(1).float() * silu(wide.float())).to(dtype) * 0.3,
        rtol=tolerance,
        atol=tolerance,
    )

"""Gated DeltaNet, Kimi Delta Attention and Mamba 2 in torch, against transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from tandem_kernels import linear_attention
from tandem_kernels.linear_attention import StateSpan
from tests.unit.kernels.state_cases import SPANS, UNNAMED, DeltaCase, Mamba2Case, cut

FORMS = {
    "delta": linear_attention.gated_delta_rule,
    "delta, recurrent": linear_attention.gated_delta_rule_recurrent,
    "kimi": linear_attention.gated_delta_rule,
    "kimi, recurrent": linear_attention.gated_delta_rule_recurrent,
    "mamba2": linear_attention.mamba2,
    "mamba2, recurrent": linear_attention.mamba2_recurrent,
}


def case_of(form: str) -> Any:
    if form.startswith("mamba2"):
        return Mamba2Case()
    return DeltaCase(by_channel=form.startswith("kimi"))


def expected(case: Any, span: StateSpan) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the last state of a span by transformers."""
    rows = slice(span.first_row, span.first_row + span.num_rows)
    before = case.states[span.slot] * (span.first_position > 0)
    if isinstance(case, DeltaCase):
        q, k, v, log_decay, beta = (x[rows].unsqueeze(0) for x in case.inputs)
        rule = (
            recurrent_kimi_delta_attention if case.by_channel else torch_recurrent_gated_delta_rule
        )
        y, state = rule(
            *(q.repeat_interleave(2, 2), k.repeat_interleave(2, 2), v, log_decay, beta),
            initial_state=before.unsqueeze(0),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return y[0], state[0]
    x, dt, b, c = (x[rows].unsqueeze(0) for x in (case.x, case.dt, case.b, case.c))
    y, state = mamba2_chunk_scan(
        *(x, dt, -case.a_log.exp(), b, c, 16),
        D=case.d,
        dt_bias=case.dt_bias,
        dt_softplus=True,
        dt_limit=case.dt_limits,
        initial_states=before.mT.unsqueeze(0),
        return_final_states=True,
    )
    return y[0], state[0].mT


def run(
    form: Callable[..., torch.Tensor], case: Any, steps: Sequence[Sequence[StateSpan]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes a span of rows in each of several steps."""
    states = case.states.clone()
    out = sum(form(*case.inputs, states, spans) for spans in steps)
    assert isinstance(out, torch.Tensor)
    return out, states


@pytest.mark.parametrize("form", FORMS)
def test_equals_transformers(form: str) -> None:
    case = case_of(form)
    out, states = run(FORMS[form], case, [SPANS])
    for span in SPANS:
        if span.num_rows:
            y, state = expected(case, span)
            rows = slice(span.first_row, span.first_row + span.num_rows)
            torch.testing.assert_close(out[rows], y, rtol=1e-4, atol=3e-5)
            torch.testing.assert_close(states[span.slot], state, rtol=1e-4, atol=1e-5)
    assert torch.equal(states[list(UNNAMED)], case.states[list(UNNAMED)])


@pytest.mark.parametrize("form", FORMS)
def test_a_state_lasts(form: str) -> None:
    """The state before a span changes its last row, so that a lost state would be noticed."""
    case = case_of(form)
    span = SPANS[2]
    assert span.first_position
    out, _ = run(FORMS[form], case, [[span]])
    case.states.zero_()
    without, _ = run(FORMS[form], case, [[span]])
    last = span.first_row + span.num_rows - 1
    assert (out[last] - without[last]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("form", "cuts"),
    [
        ("delta", (64, 192)),
        ("delta", (128,)),
        ("delta", (256, 270, 299)),  # after the last whole inner chunk, any cut
        ("kimi", (64, 192)),
        ("mamba2", (64, 192)),
        ("delta, recurrent", (1, 2, 63, 100)),
        ("kimi, recurrent", (1, 2, 63, 100)),
        ("mamba2, recurrent", (1, 2, 63, 100)),
    ],
)
def test_bits_do_not_depend_on_cuts(form: str, cuts: tuple[int, ...]) -> None:
    case = case_of(form)
    # Skip adds d x to rows without a span, so rows are compared one step at a time.
    states = case.states.clone()
    whole = FORMS[form](*case.inputs, states, cut(300, ()))
    cut_states = case.states.clone()
    for span in cut(300, cuts):
        part = FORMS[form](*case.inputs, cut_states, [span])
        rows = slice(span.first_row, span.first_row + span.num_rows)
        assert torch.equal(part[rows], whole[rows])
    assert torch.equal(cut_states, states)


@pytest.mark.parametrize("form", ["delta, recurrent", "kimi, recurrent", "mamba2, recurrent"])
def test_bits_do_not_depend_on_the_batch(form: str) -> None:
    case = case_of(form)
    together, states = run(FORMS[form], case, [SPANS])
    for span in SPANS:
        alone, alone_states = run(FORMS[form], case, [[span]])
        rows = slice(span.first_row, span.first_row + span.num_rows)
        assert torch.equal(alone[rows], together[rows])
        assert torch.equal(alone_states[span.slot], states[span.slot])


@pytest.mark.parametrize("form", FORMS)
def test_states_may_be_views(form: str) -> None:
    """[head, layer] is the order of a slot in the pool."""
    case = case_of(form)
    out, states = run(FORMS[form], case, [SPANS])
    slots, heads, *shape = case.states.shape
    pool = torch.full((slots, heads, 3, *shape), float("nan"))
    pool[:, :, 1] = case.states
    assert torch.equal(FORMS[form](*case.inputs, pool[:, :, 1], SPANS), out)
    assert torch.equal(pool[:, :, 1], states)


@pytest.mark.parametrize("form", ["delta", "kimi"])
def test_a_chunk_that_forgets_all_is_finite(form: str) -> None:
    """exp(-G) alone would overflow."""
    case = case_of(form)
    case.a_log += 6.0
    out, states = run(FORMS[form], case, [SPANS])
    recurrent, recurrent_states = run(FORMS[f"{form}, recurrent"], case, [SPANS])
    torch.testing.assert_close(out, recurrent, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states, recurrent_states, rtol=1e-4, atol=1e-5)

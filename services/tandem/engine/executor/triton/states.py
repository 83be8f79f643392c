"""Computes layers that keep a state (tandem/models/config/linear_attention.py) with the Triton
kernels, up to their output matrix, first for sequences with one token in the step and then for
sequences with a chunk:

    Gated DeltaNet       the convolution of q, k and v; the gates, and the update of the states; the
                         norm of each head's output with the output gate
    Mamba 2              the convolution of x, B and C; the same, with a norm of the gated output or
                         none
    short convolution    the convolution, with both gates

States are updated row by row for single tokens, by matrix products for chunks.
"""

from __future__ import annotations

from math import inf

import torch

from tandem.engine.executor.triton.inputs import StepViews
from tandem.engine.executor.weights.decoder_weights import StateWeights
from tandem.models.config.linear_attention import (
    GatedDelta,
    LinearAttention,
    Mamba2,
    ShortConv,
)
from tandem_kernels.triton.causal_conv import Section, causal_conv1d, gated_conv1d
from tandem_kernels.triton.gated_norm import gated_rms_norm, rms_norm_of_gated
from tandem_kernels.triton.linear_attention import (
    gated_delta_rule,
    gated_delta_rule_recurrent,
    mamba2,
    mamba2_recurrent,
)
from tandem_kernels.triton.state_spans import DeviceSpans


def state_layer(
    sizes: LinearAttention,
    weights: StateWeights,
    projected: torch.Tensor,
    step: StepViews,
    group: int,
    states: torch.Tensor,
    conv_states: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Updates the states of the step's sequences. Returns [T, outputs]; padding gets zeros.

    projected    [T, ...]: the product of the layer's first matrices (`LayerWeights.qkv`)
    group        index of the layer's KV group, a state group
    states, conv_states    `matrices` and `convs` of StatePool for this layer
    eps          epsilon of the model's norms
    """
    num_single = step.shape.num_single
    parts = []
    for rows, spans in (
        (projected[:num_single], step.single_spans(group)),
        (projected[num_single:], step.chunk_spans(group)),
    ):
        if not len(rows):
            continue
        if isinstance(sizes, ShortConv):
            out = gated_conv1d(rows, weights.conv, weights.conv_bias, conv_states, spans)
        elif isinstance(sizes, Mamba2):
            out = _mamba2(sizes, weights, rows, spans, states, conv_states, eps)
        else:
            assert isinstance(sizes, GatedDelta)  # as kernel_choice.py makes sure
            out = _gated_delta(sizes, weights, rows, spans, states, conv_states, eps)
        parts.append(out)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _gated_delta(
    sizes: GatedDelta,
    weights: StateWeights,
    projected: torch.Tensor,
    spans: DeviceSpans,
    states: torch.Tensor,
    conv_states: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Returns [rows, value heads * value dim] for the rows of single tokens or of chunks."""
    num_heads = sizes.num_heads
    assert weights.a_log is not None
    assert weights.dt_bias is not None
    assert weights.norm is not None
    channels, z, b, a = torch.split(
        projected, [sizes.num_channels, sizes.num_outputs, num_heads, num_heads], 1
    )
    q, k, v = _convolved(sizes, weights, channels, spans, conv_states)
    rule = gated_delta_rule_recurrent if spans.max_rows == 1 else gated_delta_rule
    out = rule(
        q.view(len(q), -1, sizes.key_dim),
        k.view(len(k), -1, sizes.key_dim),
        v.view(len(v), -1, sizes.value_dim),
        a,
        b,
        weights.a_log,
        weights.dt_bias,
        states,
        spans,
        sizes.rate_max,
    )
    eps = eps if sizes.norm_eps is None else sizes.norm_eps
    gates = z.view(len(z), num_heads, -1)
    return gated_rms_norm(out, gates, weights.norm, eps).flatten(1)


def _mamba2(
    sizes: Mamba2,
    weights: StateWeights,
    projected: torch.Tensor,
    spans: DeviceSpans,
    states: torch.Tensor,
    conv_states: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Returns [rows, heads * value dim] for the rows of single tokens or of chunks."""
    assert weights.a_log is not None
    assert weights.dt_bias is not None
    assert weights.skip is not None
    z, channels, dt = torch.split(
        projected, [sizes.num_outputs, sizes.num_channels, sizes.num_heads], 1
    )
    x, b, c = _convolved(sizes, weights, channels, spans, conv_states)
    scan = mamba2_recurrent if spans.max_rows == 1 else mamba2
    out = scan(
        x.view(len(x), sizes.num_heads, -1),
        dt,
        b.view(len(b), sizes.num_groups, -1),
        c.view(len(c), sizes.num_groups, -1),
        weights.a_log,
        weights.skip,
        weights.dt_bias,
        (0.0, inf),
        states,
        spans,
    )
    size = sizes.num_outputs // sizes.num_groups
    return rms_norm_of_gated(
        out.flatten(1), z, weights.norm, eps, size, factor=weights.output_factor
    )


def _convolved(
    sizes: GatedDelta | Mamba2,
    weights: StateWeights,
    channels: torch.Tensor,
    spans: DeviceSpans,
    conv_states: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Returns the sections of the convolution of `channels` with SiLU."""
    convolved = causal_conv1d(
        channels,
        weights.conv,
        weights.conv_bias,
        conv_states,
        spans,
        has_silu=True,
        sections=[*map(Section, sizes.sections, sizes.head_sections)],
    )
    return torch.split(convolved, sizes.sections, 1)

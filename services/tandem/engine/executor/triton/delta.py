"""Computes Gated DeltaNet layers (tandem/models/config/linear_attention.py) with the Triton
kernels, up to their output matrix, first for sequences with one token in the step and then for
sequences with a chunk:

1. The convolutions of q, k and v.
2. The gates, and the update of the states: row by row for single tokens, by matrix products for
   chunks.
3. The norm of each head's output with the output gate.
"""

from __future__ import annotations

import torch

from tandem.engine.executor.triton.inputs import StepViews
from tandem.engine.executor.weights.decoder_weights import StateWeights
from tandem.models.config.linear_attention import GatedDelta
from tandem_kernels.triton.causal_conv import causal_conv1d
from tandem_kernels.triton.gated_norm import gated_rms_norm
from tandem_kernels.triton.linear_attention import gated_delta_rule, gated_delta_rule_recurrent
from tandem_kernels.triton.state_spans import DeviceSpans


def delta_layer(
    sizes: GatedDelta,
    weights: StateWeights,
    projected: torch.Tensor,
    step: StepViews,
    group: int,
    states: torch.Tensor,
    conv_states: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Updates the states of the step's sequences. Returns [T, value heads * value dim]; padding
    gets zeros.

    projected    [T, ...]: the channels of the convolution, the output gates z, and b and a side by
                 side
    group        index of the layer's KV group, a state group
    states, conv_states    `matrices` and `convs` of StatePool for this layer
    """
    num_single = step.shape.num_single
    parts = []
    for rows, spans in (
        (projected[:num_single], step.single_spans(group)),
        (projected[num_single:], step.chunk_spans(group)),
    ):
        if len(rows):
            parts.append(_attended(sizes, weights, rows, spans, states, conv_states, eps))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)


def _attended(
    sizes: GatedDelta,
    weights: StateWeights,
    projected: torch.Tensor,
    spans: DeviceSpans,
    states: torch.Tensor,
    conv_states: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Returns [rows, value heads, value dim] for the rows of single tokens or of chunks."""
    num_heads = sizes.num_heads
    assert weights.a_log is not None
    assert weights.dt_bias is not None
    assert weights.norm is not None
    channels, z, b, a = torch.split(
        projected, [sizes.num_channels, sizes.num_outputs, num_heads, num_heads], 1
    )
    q, k, v = (
        causal_conv1d(x, taps, None, inputs, spans, has_silu=True)
        for x, taps, inputs in zip(
            torch.split(channels, sizes.sections, 1),
            torch.split(weights.conv, sizes.sections),
            torch.split(conv_states, sizes.head_sections, -1),
            strict=True,
        )
    )
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
    )
    eps = eps if sizes.norm_eps is None else sizes.norm_eps
    return gated_rms_norm(out, z.view(len(z), num_heads, -1), weights.norm, eps)

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv1d, silu

from tandem_kernels.causal_conv import causal_conv1d
from tests.unit.kernels.state_cases import NUM_ROWS, NUM_SLOTS, SPANS, UNNAMED, cut

CHANNELS = 24


@pytest.mark.parametrize("kernel", [3, 4])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", [None, silu])
def test_equals_torch(kernel: int, has_bias: bool, activation: object) -> None:
    x = torch.randn(NUM_ROWS, CHANNELS)
    weight, bias = torch.randn(CHANNELS, kernel), torch.randn(CHANNELS) if has_bias else None
    states = torch.randn(NUM_SLOTS, 1, kernel - 1, CHANNELS)
    after = states.clone()
    out = causal_conv1d(x, weight, bias, after, SPANS, silu if activation else None)
    for span in SPANS:
        rows = slice(span.first_row, span.first_row + span.num_rows)
        before = states[span.slot, 0] * (span.first_position > 0)
        inputs = torch.cat((before, x[rows]))
        if span.num_rows:
            y = conv1d(inputs.t(), weight.unsqueeze(1), bias, groups=CHANNELS).t()
            torch.testing.assert_close(out[rows], silu(y) if activation else y)
            assert torch.equal(after[span.slot, 0], inputs[span.num_rows :])
    assert torch.equal(after[list(UNNAMED)], states[list(UNNAMED)])


def test_bits_do_not_depend_on_cuts_or_groups() -> None:
    x, weight = torch.randn(48, CHANNELS), torch.randn(CHANNELS, 4)
    plain = torch.randn(NUM_SLOTS, 1, 3, CHANNELS)
    grouped = torch.randn(NUM_SLOTS, 3, 3, CHANNELS // 3)
    whole = causal_conv1d(x, weight, None, plain, cut(48, ()), silu)
    for span in cut(48, (1, 2, 4, 30)):
        part = causal_conv1d(x, weight, None, grouped, [span], silu)
        rows = slice(span.first_row, span.first_row + span.num_rows)
        assert torch.equal(part[rows], whole[rows])
    assert torch.equal(grouped[3].transpose(0, 1).flatten(1), plain[3, 0])

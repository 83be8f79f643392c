"""Short causal convolution of each channel, with a kernel of n inputs:

    y_t = activation(bias + sum of weight[i] x_{t - n + 1 + i} for 0 <= i < n)

The state of a sequence has its last n - 1 inputs. Gated DeltaNet and Mamba 2 convolve their
projections, and LFM2 has layers that are only a convolution.
"""

from collections.abc import Callable, Sequence

import torch

from tandem_kernels.linear_attention import StateSpan


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    spans: Sequence[StateSpan],
    activation: Callable[[torch.Tensor], torch.Tensor] | None,
) -> torch.Tensor:
    """Convolves the rows of each span.

    x        [T, channels]
    weight   [channels, n]
    bias     [channels] or None
    states   [slots, groups, n - 1, group size], with any strides: the last inputs, oldest first.
             Channel c is in group c // (group size), so the last groups may have room to spare. The
             spans' slots are updated in place. The states of a sequence that begins are zeros,
             whatever the slot contains.

    Returns [T, channels] in the dtype of x; the sums are fp32. Rows without a span are
    activation(0). A token's bits depend on nothing but its own sequence, if T is a multiple of 16.
    """
    out = torch.zeros(x.shape, device=x.device)
    num_channels, num_taps = weight.shape
    num_groups, group_size = states.shape[1], states.shape[3]
    num_spare = num_groups * group_size - num_channels
    taps = weight.float().t()
    for span in spans:
        if span.num_rows == 0:
            continue
        rows = slice(span.first_row, span.first_row + span.num_rows)
        state = states[span.slot].transpose(0, 1).flatten(1)[:, :num_channels]
        if span.first_position == 0:
            state = torch.zeros_like(state)
        inputs = torch.cat((state.to(x.dtype), x[rows]))
        wide = inputs.float()
        sums = wide[: span.num_rows] * taps[0]
        for i in range(1, num_taps):
            sums += wide[i : i + span.num_rows] * taps[i]
        if bias is not None:
            sums += bias.float()
        out[rows] = sums
        last = torch.nn.functional.pad(inputs[span.num_rows :], (0, num_spare))
        last = last.view(num_taps - 1, num_groups, group_size)
        states[span.slot] = last.transpose(0, 1).to(states.dtype)
    return (out if activation is None else activation(out)).to(x.dtype)

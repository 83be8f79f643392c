"""Short causal convolution of each channel (see tandem_kernels/causal_conv.py).

The rows of a span are convolved in parallel, so the states are updated by a second kernel.
"""

import torch
import triton
import triton.language as tl

from tandem_kernels.triton.state_spans import UNALIGNED, DeviceSpans
from tandem_kernels.triton.tuning import next_power_of_2

_ROWS = 16
_CHANNELS = 128


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    spans: DeviceSpans,
    *,
    has_silu: bool,
) -> torch.Tensor:
    """Returns the same as tandem_kernels.causal_conv.causal_conv1d, for the rows of the spans. The
    other rows are undefined. The rows of x may be strided."""
    num_channels, num_taps = weight.shape
    assert x.stride(1) == states.stride(3) == 1
    assert weight.is_contiguous()
    out = x.new_empty(x.shape)
    if spans.max_rows == 0:
        return out
    rows = min(_ROWS, next_power_of_2(spans.max_rows))
    num_blocks = triton.cdiv(num_channels, _CHANNELS)
    arguments = (x, states, *spans.tensors, x.stride(0), *states.stride()[:3])
    constants = {
        "NUM_CHANNELS": num_channels,
        "GROUP_SIZE": states.shape[3],
        "NUM_TAPS": num_taps,
        "CHANNELS": _CHANNELS,
    }
    _convolve[(triton.cdiv(spans.max_rows, rows), len(spans), num_blocks)](
        *(weight, bias, out, *arguments),
        ROWS=rows,
        HAS_BIAS=bias is not None,
        HAS_SILU=has_silu,
        **constants,
    )
    _keep_last[(len(spans), num_blocks)](
        *arguments, TAPS=next_power_of_2(num_taps - 1), **constants
    )
    return out


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _convolve(
    weight,
    bias,
    out,
    x,
    states,
    first_rows,
    num_rows,
    first_positions,
    slots,
    stride_x,
    stride_slot,
    stride_group,
    stride_tap,
    NUM_CHANNELS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
):
    span = tl.program_id(1)
    num = tl.load(num_rows + span)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(0) * ROWS >= num:
        return
    channels = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channels < NUM_CHANNELS
    first = tl.load(first_rows + span).to(tl.int64)
    first_position = tl.load(first_positions + span)
    state = states + tl.load(slots + span).to(tl.int64) * stride_slot
    state += channels // GROUP_SIZE * stride_group + channels % GROUP_SIZE
    sums = tl.zeros([ROWS, CHANNELS], dtype=tl.float32)
    for tap in tl.static_range(NUM_TAPS):
        at = rows + tap - (NUM_TAPS - 1)  # row of the span; below 0: in the state
        is_before = (at < 0) & (first_position + at >= 0)
        inputs = tl.load(
            x + (first + at[:, None]) * stride_x + channels[None, :],
            mask=(at >= 0)[:, None] & (at < num)[:, None] & is_channel[None, :],
            other=0.0,
        ).to(tl.float32)
        inputs += tl.load(
            state[None, :] + (at[:, None] + NUM_TAPS - 1) * stride_tap,
            mask=is_before[:, None] & is_channel[None, :],
            other=0.0,
        ).to(tl.float32)
        weights = tl.load(weight + channels * NUM_TAPS + tap, mask=is_channel, other=0.0)
        sums += inputs * weights.to(tl.float32)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + channels, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    if HAS_SILU:
        sums = sums / (1.0 + tl.exp(-sums))
    tl.store(
        out + (first + rows[:, None]) * NUM_CHANNELS + channels[None, :],
        sums.to(out.dtype.element_ty),
        mask=(rows < num)[:, None] & is_channel[None, :],
    )


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _keep_last(
    x,
    states,
    first_rows,
    num_rows,
    first_positions,
    slots,
    stride_x,
    stride_slot,
    stride_group,
    stride_tap,
    NUM_CHANNELS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
):
    """Stores the last inputs of a span for some channels."""
    span = tl.program_id(0)
    num = tl.load(num_rows + span)
    if num == 0:
        return
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    taps = tl.arange(0, TAPS)
    is_kept = (taps < NUM_TAPS - 1)[:, None] & (channels < NUM_CHANNELS)[None, :]
    first = tl.load(first_rows + span).to(tl.int64)
    first_position = tl.load(first_positions + span)
    state = states + tl.load(slots + span).to(tl.int64) * stride_slot
    state += channels // GROUP_SIZE * stride_group + channels % GROUP_SIZE
    at = num - (NUM_TAPS - 1) + taps
    inputs = tl.load(
        x + (first + at[:, None]) * stride_x + channels[None, :],
        mask=is_kept & (at >= 0)[:, None],
        other=0.0,
    ).to(tl.float32)
    # An input from before the span moves from tap `taps + num` to tap `taps`.
    inputs += tl.load(
        state[None, :] + (taps + num)[:, None] * stride_tap,
        mask=is_kept & ((at < 0) & (first_position + at >= 0))[:, None],
        other=0.0,
    ).to(tl.float32)
    # All threads must have loaded the state before one of them changes it.
    tl.debug_barrier()
    tl.store(
        state[None, :] + taps[:, None] * stride_tap,
        inputs.to(states.dtype.element_ty),
        mask=is_kept,
    )

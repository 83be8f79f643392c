"""Short causal convolution of each channel (see tandem_kernels/causal_conv.py).

The rows of a span are convolved in parallel, so a second kernel updates the states of spans with
several rows. Spans of one row need one launch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tandem_kernels.triton.state_spans import UNALIGNED, DeviceSpans
from tandem_kernels.triton.tuning import next_power_of_2

_ROWS = 16
_CHANNELS = 128
_SECTIONS_MAX = 3


class Section(NamedTuple):
    """Consecutive channels of x. In a state, each group has room for some of them."""

    num_channels: int
    room: int  # channel c of the section is channel c % room of group c // room


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    spans: DeviceSpans,
    *,
    has_silu: bool,
    sections: Sequence[Section] | None = None,
) -> torch.Tensor:
    """Returns the same as tandem_kernels.causal_conv.causal_conv1d, for the rows of the spans. The
    other rows are undefined. The rows of x may be strided.

    sections    at most 3 parts of the channels, such as q, k and v, each of which is divided among
                the groups of the states; in a group, one follows the other. None: one part
    """
    out = x.new_empty(x.shape)
    _launch(x, weight, bias, states, spans, out, sections, has_silu=has_silu, is_gated=False)
    return out


def gated_conv1d(
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    spans: DeviceSpans,
) -> torch.Tensor:
    """Returns C * convolution(B * x), [T, channels]. `projected` has B, C and x side by side,
    [T, 3 * channels]. Rows without a span are zeros. The other arguments are those of
    `causal_conv1d`."""
    out = projected.new_zeros(len(projected), len(weight))
    _launch(projected, weight, bias, states, spans, out, None, has_silu=False, is_gated=True)
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    spans: DeviceSpans,
    out: torch.Tensor,
    sections: Sequence[Section] | None,
    *,
    has_silu: bool,
    is_gated: bool,
) -> None:
    num_channels, num_taps = weight.shape
    sections = sections or [Section(num_channels, states.shape[3])]
    assert x.stride(1) == states.stride(3) == 1
    assert weight.is_contiguous()
    assert x.shape[1] == num_channels * (3 if is_gated else 1)
    assert sum(section.num_channels for section in sections) == num_channels
    assert sum(section.room for section in sections) == states.shape[3]
    if spans.max_rows == 0:
        return
    # The kernels always have the same number of sections; surplus ones have no channels.
    sections = [*sections, *[Section(0, 1)] * (_SECTIONS_MAX - len(sections))]
    rows = min(_ROWS, next_power_of_2(spans.max_rows))
    num_blocks = triton.cdiv(num_channels, _CHANNELS)
    arguments = (x, states, *spans.tensors, x.stride(0), *states.stride()[:3])
    constants = {
        "NUM_CHANNELS": num_channels,
        "FIRST_1": sections[0].num_channels,
        "FIRST_2": sections[0].num_channels + sections[1].num_channels,
        "ROOM_0": sections[0].room,
        "ROOM_1": sections[1].room,
        "ROOM_2": sections[2].room,
        "NUM_TAPS": num_taps,
        "TAPS": next_power_of_2(num_taps - 1),
        "CHANNELS": _CHANNELS,
        "IS_GATED": is_gated,
    }
    is_single = spans.max_rows == 1
    _convolve[(triton.cdiv(spans.max_rows, rows), len(spans), num_blocks)](
        *(weight, bias, out, *arguments),
        ROWS=rows,
        HAS_BIAS=bias is not None,
        HAS_SILU=has_silu,
        IS_SINGLE=is_single,
        **constants,
    )
    if not is_single:
        _keep_last[(len(spans), num_blocks)](*arguments, **constants)


@triton.jit
def _in_state(
    channels,
    stride_group,
    FIRST_1: tl.constexpr,
    FIRST_2: tl.constexpr,
    ROOM_0: tl.constexpr,
    ROOM_1: tl.constexpr,
    ROOM_2: tl.constexpr,
):
    """Returns the offsets of channels in a state."""
    is_second, is_third = channels >= FIRST_1, channels >= FIRST_2
    own = channels - tl.where(is_third, FIRST_2, tl.where(is_second, FIRST_1, 0))
    room = tl.where(is_third, ROOM_2, tl.where(is_second, ROOM_1, ROOM_0))
    before = tl.where(is_third, ROOM_0 + ROOM_1, tl.where(is_second, ROOM_0, 0))
    return own // room * stride_group + before + own % room


@triton.jit
def _inputs(x, rows, stride_x, channels, mask, NUM_CHANNELS: tl.constexpr, IS_GATED: tl.constexpr):
    """Loads inputs of the convolution, fp32 [rows, channels]."""
    at = x + rows[:, None] * stride_x + channels[None, :]
    if IS_GATED:
        inputs = tl.load(at + 2 * NUM_CHANNELS, mask=mask, other=0.0).to(tl.float32)
        inputs *= tl.load(at, mask=mask, other=0.0).to(tl.float32)
        inputs = inputs.to(x.dtype.element_ty).to(tl.float32)  # rounds as the torch code does
    else:
        inputs = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return inputs


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
    FIRST_1: tl.constexpr,
    FIRST_2: tl.constexpr,
    ROOM_0: tl.constexpr,
    ROOM_1: tl.constexpr,
    ROOM_2: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_SINGLE: tl.constexpr,
):
    span = tl.program_id(1)
    num = tl.load(num_rows + span)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(0) * ROWS >= num:
        return
    dtype: tl.constexpr = out.dtype.element_ty
    channels = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channels < NUM_CHANNELS
    first = tl.load(first_rows + span).to(tl.int64)
    first_position = tl.load(first_positions + span)
    state = states + tl.load(slots + span).to(tl.int64) * stride_slot
    state += _in_state(channels, stride_group, FIRST_1, FIRST_2, ROOM_0, ROOM_1, ROOM_2)
    sums = tl.zeros([ROWS, CHANNELS], dtype=tl.float32)
    for tap in tl.static_range(NUM_TAPS):
        at = rows + tap - (NUM_TAPS - 1)  # row of the span; below 0: in the state
        is_before = (at < 0) & (first_position + at >= 0)
        is_own = ((at >= 0) & (at < num))[:, None] & is_channel[None, :]
        inputs = _inputs(x, first + at, stride_x, channels, is_own, NUM_CHANNELS, IS_GATED)
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
    is_row = (rows < num)[:, None] & is_channel[None, :]
    if IS_GATED:
        gates = x + (first + rows[:, None]) * stride_x + NUM_CHANNELS + channels[None, :]
        sums = sums.to(dtype).to(tl.float32)  # rounds as the torch code does
        sums *= tl.load(gates, mask=is_row, other=0.0).to(tl.float32)
    tl.store(
        out + (first + rows[:, None]) * NUM_CHANNELS + channels[None, :],
        sums.to(dtype),
        mask=is_row,
    )
    if IS_SINGLE:
        _keep(
            x,
            state,
            first,
            num,
            first_position,
            channels,
            stride_x,
            stride_tap,
            NUM_CHANNELS,
            NUM_TAPS,
            TAPS,
            IS_GATED,
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
    FIRST_1: tl.constexpr,
    FIRST_2: tl.constexpr,
    ROOM_0: tl.constexpr,
    ROOM_1: tl.constexpr,
    ROOM_2: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    IS_GATED: tl.constexpr,
):
    """Stores the last inputs of a span for some channels."""
    span = tl.program_id(0)
    num = tl.load(num_rows + span)
    if num == 0:
        return
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    first = tl.load(first_rows + span).to(tl.int64)
    first_position = tl.load(first_positions + span)
    state = states + tl.load(slots + span).to(tl.int64) * stride_slot
    state += _in_state(channels, stride_group, FIRST_1, FIRST_2, ROOM_0, ROOM_1, ROOM_2)
    _keep(
        x,
        state,
        first,
        num,
        first_position,
        channels,
        stride_x,
        stride_tap,
        NUM_CHANNELS,
        NUM_TAPS,
        TAPS,
        IS_GATED,
    )


@triton.jit
def _keep(
    x,
    state,
    first,
    num,
    first_position,
    channels,
    stride_x,
    stride_tap,
    NUM_CHANNELS: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    TAPS: tl.constexpr,
    IS_GATED: tl.constexpr,
):
    taps = tl.arange(0, TAPS)
    is_kept = (taps < NUM_TAPS - 1)[:, None] & (channels < NUM_CHANNELS)[None, :]
    at = num - (NUM_TAPS - 1) + taps
    is_own = is_kept & (at >= 0)[:, None]
    inputs = _inputs(x, first + at, stride_x, channels, is_own, NUM_CHANNELS, IS_GATED)
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
        inputs.to(state.dtype.element_ty),
        mask=is_kept,
    )

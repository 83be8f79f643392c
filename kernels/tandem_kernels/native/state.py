"""The C++ kernels of layers with a state, for tests and measurements. A call computes one thing.
A decoder calls the same kernels within a step (state.h). Tensors are fp32.
"""

from collections.abc import Sequence
from ctypes import Structure, addressof, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch

from tandem_kernels.linear_attention import StateSpan
from tandem_kernels.native.library import Library

TAPS_MAX = 8
_UNUSED = (0.0, 0.0)


class Span(Structure):
    _fields_ = tuple(
        (name, c_int32) for name in ("first_row", "num_rows", "first_position", "slot")
    )


class HeadRows(Structure):
    _fields_ = (("data", c_void_p), ("row_stride", c_int64), ("head_stride", c_int64))


class Convolution(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("y", c_void_p),
        ("row_stride", c_int64),
        *((name, c_void_p) for name in ("taps", "bias", "states")),
        *((name, c_int64) for name in ("slot_stride", "group_stride", "tap_stride")),
        *((name, c_int32) for name in ("num_channels", "group_size", "num_taps", "has_silu")),
        ("spans", c_void_p),
        ("num_spans", c_int32),
    )


class StateScan(Structure):
    _fields_ = (
        *((name, HeadRows) for name in ("q", "k", "v")),
        ("v_group_stride", c_int64),
        *((name, HeadRows) for name in ("a", "b")),
        ("decays", c_void_p),
        ("decay_stride", c_int64),
        *((name, c_void_p) for name in ("a_log", "dt_bias", "skip")),
        ("dt_min", c_float),
        ("dt_max", c_float),
        ("rate_max", c_float),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("states", c_void_p),
        ("slot_stride", c_int64),
        ("head_stride", c_int64),
        *((name, c_int32) for name in ("num_k_heads", "num_v_heads", "key_dim", "value_dim")),
        ("is_delta", c_int32),
        ("spans", c_void_p),
        ("num_spans", c_int32),
    )


class StateKernels:
    """The kernels of one instruction set, computed by `num_threads` threads."""

    def __init__(self, library: Library, num_threads: int, instructions: str | None = None) -> None:
        self._library = library
        self._num_threads = num_threads
        self._instructions = instructions

    def causal_conv1d(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        states: torch.Tensor,
        spans: Sequence[StateSpan],
        *,
        has_silu: bool,
    ) -> torch.Tensor:
        """Returns the same as causal_conv.causal_conv1d, for kernels of at most TAPS_MAX inputs."""
        taps = weight.t().contiguous()
        y = torch.zeros_like(x)
        slot_stride, group_stride, tap_stride, _ = states.stride()
        self._call(
            "tandem_convolve",
            Convolution(
                x=x.data_ptr(),
                y=y.data_ptr(),
                row_stride=x.stride(0),
                taps=taps.data_ptr(),
                bias=None if bias is None else bias.data_ptr(),
                states=states.data_ptr(),
                slot_stride=slot_stride,
                group_stride=group_stride,
                tap_stride=tap_stride,
                num_channels=x.shape[1],
                group_size=states.shape[3],
                num_taps=len(taps),
                has_silu=has_silu,
            ),
            spans,
        )
        return y

    def gated_delta_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        states: torch.Tensor,
        spans: Sequence[StateSpan],
    ) -> torch.Tensor:
        """Returns the same as linear_attention.gated_delta_rule_recurrent, with the gates of
        delta_gates(a, b, a_log, dt_bias). `v` may be [T, k heads, v heads of a k head, d_v]; the
        result is [T, v heads, d_v]. With decays by channel, `a` is [T, v heads, d_k], and `dt_bias`
        [v heads, d_k]."""
        return self._scan((q, k, v, a, b), (a_log, dt_bias, None), _UNUSED, states, spans)

    def mamba2(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        a_log: torch.Tensor,
        d: torch.Tensor,
        dt_bias: torch.Tensor,
        dt_limits: tuple[float, float],
        states: torch.Tensor,
        spans: Sequence[StateSpan],
    ) -> torch.Tensor:
        """Returns the same as linear_attention.mamba2_recurrent."""
        return self._scan((c, b, x, dt, None), (a_log, dt_bias, d), dt_limits, states, spans)

    def _scan(
        self,
        rows: tuple[torch.Tensor | None, ...],
        of_heads: tuple[torch.Tensor | None, ...],
        dt_limits: tuple[float, float],
        states: torch.Tensor,
        spans: Sequence[StateSpan],
    ) -> torch.Tensor:
        q, k, v, a, b = rows
        assert k is not None
        assert v is not None
        decays = a.clone() if a is not None and a.dim() == 3 else None
        num_shared = states.shape[1] // k.shape[1]
        if v.dim() == 3:
            v = v.view(len(v), k.shape[1], num_shared, -1)
        y = v.new_zeros(len(v), states.shape[1], v.shape[3])
        slot_stride, head_stride, _, _ = states.stride()
        a_log, dt_bias, skip = (None if each is None else each.data_ptr() for each in of_heads)
        self._call(
            "tandem_scan_states",
            StateScan(
                q=_head_rows(q),
                k=_head_rows(k),
                v=HeadRows(v.data_ptr(), v.stride(0), v.stride(2)),
                v_group_stride=v.stride(1),
                a=_head_rows(a if decays is None else None),
                b=_head_rows(b),
                decays=None if decays is None else decays.data_ptr(),
                decay_stride=0 if decays is None else decays.stride(0),
                a_log=a_log,
                dt_bias=dt_bias,
                skip=skip,
                dt_min=dt_limits[0],
                dt_max=dt_limits[1],
                rate_max=1.0,
                y=y.data_ptr(),
                y_stride=y.stride(0),
                states=states.data_ptr(),
                slot_stride=slot_stride,
                head_stride=head_stride,
                num_k_heads=k.shape[1],
                num_v_heads=states.shape[1],
                key_dim=k.shape[2],
                value_dim=v.shape[3],
                is_delta=b is not None,
            ),
            spans,
        )
        return y

    def _call(self, name: str, operation: Any, spans: Sequence[StateSpan]) -> None:
        longest_first = sorted(spans, key=lambda span: -span.num_rows)
        array = (Span * len(spans))(
            *(
                Span(span.first_row, span.num_rows, span.first_position, span.slot)
                for span in longest_first
            )
        )
        operation.spans, operation.num_spans = addressof(array), len(spans)
        self._library.state_operation(name, operation, self._num_threads, self._instructions)


def _head_rows(rows: torch.Tensor | None) -> HeadRows:
    if rows is None:
        return HeadRows()
    return HeadRows(rows.data_ptr(), rows.stride(0), rows.stride(1))

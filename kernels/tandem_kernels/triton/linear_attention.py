"""Gated DeltaNet and Mamba 2 (see tandem_kernels/linear_attention.py).

Each program has some columns of the state of one head of one sequence in registers. There are two
forms:

- *recurrent*, row by row: for single tokens, and for `invariant` numerics.
- *chunked*, by matrix products over inner chunks of 64 positions. Rows of an inner chunk that are
  not in the span have q = k = 0 and no decay. One kernel computes, for all inner chunks in
  parallel, everything that does not depend on the state. Another one takes the inner chunks of a
  sequence one after the other. Operands of products have the dtype of v; sums and states are fp32.

The names of arguments are those of Gated DeltaNet. Mamba 2 has C, B, x and dt in place of q, k, v
and a.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tandem_kernels.linear_attention import INNER_CHUNK
from tandem_kernels.triton.attention_loop import product
from tandem_kernels.triton.state_spans import UNALIGNED, DeviceSpans
from tandem_kernels.triton.tuning import next_power_of_2

NUM_WARPS = 8  # With 4, the recurrent form spills registers on sm_100 and sm_120.
_COLUMNS = 32
_UNUSED_LIMITS = (0.0, 0.0)


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    spans: DeviceSpans,
    rate_max: float = 1.0,
) -> torch.Tensor:
    """Returns the same as tandem_kernels.linear_attention.gated_delta_rule, with the gates of
    delta_gates(a, b, a_log, dt_bias), of which the second is multiplied by `rate_max`. Tokens and
    heads may be strided."""
    arguments = _arguments(q, k, v, a, b, a_log, dt_bias, None, _UNUSED_LIMITS, states, spans)
    arguments["RATE_MAX"] = rate_max
    return _scanned_chunks(v, spans, arguments)


def gated_delta_rule_recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    spans: DeviceSpans,
    rate_max: float = 1.0,
) -> torch.Tensor:
    """Computes the same as `gated_delta_rule`, row by row."""
    arguments = _arguments(q, k, v, a, b, a_log, dt_bias, None, _UNUSED_LIMITS, states, spans)
    arguments["RATE_MAX"] = rate_max
    return _scanned_rows(v, spans, arguments)


def mamba2(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    a_log: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limits: tuple[float, float],
    states: torch.Tensor,
    spans: DeviceSpans,
) -> torch.Tensor:
    """Returns the same as tandem_kernels.linear_attention.mamba2. Tokens and heads may be
    strided."""
    arguments = _arguments(c, b, x, dt, None, a_log, dt_bias, d, dt_limits, states, spans)
    return _scanned_chunks(x, spans, arguments)


def mamba2_recurrent(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    a_log: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limits: tuple[float, float],
    states: torch.Tensor,
    spans: DeviceSpans,
) -> torch.Tensor:
    """Computes the same as `mamba2`, row by row."""
    arguments = _arguments(c, b, x, dt, None, a_log, dt_bias, d, dt_limits, states, spans)
    return _scanned_rows(x, spans, arguments)


def _arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor | None,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor | None,
    dt_limits: tuple[float, float],
    states: torch.Tensor,
    spans: DeviceSpans,
) -> dict[str, Any]:
    """Returns the arguments that both forms have."""
    assert q.stride(2) == k.stride(2) == v.stride(2) == states.stride(3) == 1
    assert states.stride(2) == v.shape[2]
    strides = {
        "stride_q": q.stride(0),
        "stride_q_head": q.stride(1),
        "stride_k": k.stride(0),
        "stride_k_head": k.stride(1),
        "stride_v": v.stride(0),
        "stride_v_head": v.stride(1),
        "stride_a": a.stride(0),
        "stride_a_head": a.stride(1),
        "stride_b": 0 if b is None else b.stride(0),
        "stride_b_head": 0 if b is None else b.stride(1),
        "stride_slot": states.stride(0),
        "stride_head": states.stride(1),
    }
    names = ("first_rows", "num_rows", "first_positions", "slots")
    return {
        **dict(zip(names, spans.tensors, strict=True)),
        **strides,
        "q": q,
        "k": k,
        "v": v,
        "a": a,
        "b": b,
        "a_log": a_log,
        "dt_bias": dt_bias,
        "skip": skip,
        "states": states,
        "DT_MIN": dt_limits[0],
        "DT_MAX": dt_limits[1],
        "KEY_DIM": k.shape[2],
        "KEYS": next_power_of_2(k.shape[2]),
        "VALUE_DIM": v.shape[2],
        "COLUMNS": min(_COLUMNS, next_power_of_2(v.shape[2])),
        "SHARED": v.shape[1] // k.shape[1],
        "NUM_HEADS": v.shape[1],
        "IS_DELTA": b is not None,
        "RATE_MAX": 1.0,
    }


def _scanned_rows(v: torch.Tensor, spans: DeviceSpans, arguments: dict[str, Any]) -> torch.Tensor:
    out = v.new_zeros(v.shape)
    if spans.max_rows:
        num_parts = triton.cdiv(v.shape[2], arguments["COLUMNS"])
        grid = len(spans), v.shape[1], num_parts
        _scan_rows[grid](out=out, num_warps=NUM_WARPS, **arguments)
    return out


def _scanned_chunks(v: torch.Tensor, spans: DeviceSpans, arguments: dict[str, Any]) -> torch.Tensor:
    out = v.new_zeros(v.shape)
    if spans.max_rows == 0:
        return out
    num_rows, num_heads, value_dim = v.shape
    arguments |= {
        "out": out,
        "scores": v.new_empty(num_rows, num_heads, INNER_CHUNK),
        "inverses": v.new_empty(num_rows, num_heads, INNER_CHUNK),
        "factors": torch.empty(num_rows, num_heads, 4, dtype=torch.float32, device=v.device),
        "CHUNK": INNER_CHUNK,
        "num_warps": NUM_WARPS,
    }

    def launch(kernel: Any, grid: tuple[int, int, int]) -> None:
        names = {"num_warps", *kernel.arg_names}
        kernel[grid](**{name: arguments[name] for name in arguments if name in names})

    # A span may begin with the last position of an inner chunk.
    num_chunks = triton.cdiv(spans.max_rows + INNER_CHUNK - 1, INNER_CHUNK)
    launch(_prepare_chunks, (num_chunks, len(spans), num_heads))
    if arguments["IS_DELTA"]:
        launch(_solve_chunks, (num_chunks, len(spans), num_heads))
    launch(_scan_chunks, (len(spans), num_heads, triton.cdiv(value_dim, arguments["COLUMNS"])))
    return out


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), of which log(1 + u) = 2 atanh(u / (2 + u)) is a series with u at most 1."""
    u = tl.exp(-tl.abs(x))
    s = u / (2.0 + u)
    square = s * s
    series = square / 15 + 1.0 / 13
    series = series * square + 1.0 / 11
    series = series * square + 1.0 / 9
    series = series * square + 1.0 / 7
    series = series * square + 1.0 / 5
    series = series * square + 1.0 / 3
    series = series * square + 1.0
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def _steps(a, a_log, dt_bias, DT_MIN: tl.constexpr, DT_MAX: tl.constexpr, IS_DELTA: tl.constexpr):
    """Returns the step sizes, and the logarithms of the decays."""
    step = _softplus(a.to(tl.float32) + tl.load(dt_bias).to(tl.float32))
    if not IS_DELTA:
        step = tl.minimum(tl.maximum(step, DT_MIN), DT_MAX)
    return step, -tl.exp(tl.load(a_log).to(tl.float32)) * step


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _scan_rows(
    out,
    q,
    k,
    v,
    a,
    b,
    a_log,
    dt_bias,
    skip,
    states,
    first_rows,
    num_rows,
    first_positions,
    slots,
    stride_q,
    stride_q_head,
    stride_k,
    stride_k_head,
    stride_v,
    stride_v_head,
    stride_a,
    stride_a_head,
    stride_b,
    stride_b_head,
    stride_slot,
    stride_head,
    DT_MIN: tl.constexpr,
    DT_MAX: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHARED: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    IS_DELTA: tl.constexpr,
    RATE_MAX: tl.constexpr,
):
    span, head = tl.program_id(0), tl.program_id(1)
    num = tl.load(num_rows + span)
    if num == 0:
        return
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    keys = tl.arange(0, KEYS)
    is_column, is_key = columns < VALUE_DIM, keys < KEY_DIM
    is_state = is_key[:, None] & is_column[None, :]
    place = states + tl.load(slots + span).to(tl.int64) * stride_slot + head * stride_head
    place += keys[:, None] * VALUE_DIM + columns[None, :]
    state = tl.load(place, mask=is_state, other=0.0)
    state = tl.where(tl.load(first_positions + span) > 0, state, 0.0)
    row = tl.load(first_rows + span).to(tl.int64)
    for _ in range(num):
        query = tl.load(
            q + row * stride_q + head // SHARED * stride_q_head + keys, mask=is_key, other=0.0
        ).to(tl.float32)
        key = tl.load(
            k + row * stride_k + head // SHARED * stride_k_head + keys, mask=is_key, other=0.0
        ).to(tl.float32)
        value = tl.load(
            v + row * stride_v + head * stride_v_head + columns, mask=is_column, other=0.0
        ).to(tl.float32)
        gate = tl.load(a + row * stride_a + head * stride_a_head)
        step, log_decay = _steps(gate, a_log + head, dt_bias + head, DT_MIN, DT_MAX, IS_DELTA)
        state *= tl.exp(log_decay)
        if IS_DELTA:
            query *= tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * KEY_DIM**-0.5
            key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
            beta = tl.sigmoid(tl.load(b + row * stride_b + head * stride_b_head).to(tl.float32))
            written = (value - tl.sum(state * key[:, None], 0)) * (beta * RATE_MAX)
        else:
            written = value * step
        state += key[:, None] * written[None, :]
        y = tl.sum(state * query[:, None], 0)
        if not IS_DELTA:
            y += value * tl.load(skip + head).to(tl.float32)
        tl.store(
            out + (row * NUM_HEADS + head) * VALUE_DIM + columns,
            y.to(out.dtype.element_ty),
            mask=is_column,
        )
        row += 1
    tl.store(place, state, mask=is_state)


@triton.jit
def _rows_of_chunk(chunk, span, first_rows, num_rows, first_positions, CHUNK: tl.constexpr):
    """Returns the rows of inner chunk number `chunk` of a span, and which of them the span has."""
    num_before = tl.load(first_positions + span) % CHUNK
    at = chunk * CHUNK - num_before + tl.arange(0, CHUNK)
    is_row = (at >= 0) & (at < tl.load(num_rows + span))
    return tl.load(first_rows + span).to(tl.int64) + at, is_row


@triton.jit
def _decays(log_decay, CHUNK: tl.constexpr):
    """Returns the sums G of the log decays, and D: exp(G_i - G_j) for j <= i, else 0."""
    i = tl.arange(0, CHUNK)
    sums = tl.cumsum(log_decay, 0)
    differences = tl.where(i[None, :] <= i[:, None], sums[:, None] - sums[None, :], float("-inf"))
    return sums, tl.exp(differences)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _prepare_chunks(
    scores,
    factors,
    q,
    k,
    a,
    a_log,
    dt_bias,
    first_rows,
    num_rows,
    first_positions,
    stride_q,
    stride_q_head,
    stride_k,
    stride_k_head,
    stride_a,
    stride_a_head,
    DT_MIN: tl.constexpr,
    DT_MAX: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    SHARED: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    IS_DELTA: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Computes for an inner chunk of a head, stored by rows:

    scores    D * Q K^T, with normed queries and keys
    factors   of the rows of K S (Mamba 2: of the values), of Q S and of K, and of S
    """
    span, head = tl.program_id(1), tl.program_id(2)
    rows, is_row = _rows_of_chunk(
        tl.program_id(0), span, first_rows, num_rows, first_positions, CHUNK
    )
    if tl.max(is_row.to(tl.int32), 0) == 0:
        return
    keys = tl.arange(0, KEYS)
    is_number = is_row[:, None] & (keys < KEY_DIM)[None, :]
    k += head // SHARED * stride_k_head
    q += head // SHARED * stride_q_head
    key = tl.load(k + rows[:, None] * stride_k + keys[None, :], mask=is_number, other=0.0)
    query = tl.load(q + rows[:, None] * stride_q + keys[None, :], mask=is_number, other=0.0)
    gate = tl.load(a + rows * stride_a + head * stride_a_head, mask=is_row, other=0.0)
    step, log_decay = _steps(gate, a_log + head, dt_bias + head, DT_MIN, DT_MAX, IS_DELTA)
    log_decay = tl.where(is_row, log_decay, 0.0)
    sums, of_scores = _decays(log_decay, CHUNK)
    last = tl.sum(log_decay, 0)
    of_scores *= product(query, tl.trans(key))
    of_keys, of_queries, of_values = tl.exp(last - sums), tl.exp(sums), step
    if IS_DELTA:
        k_factor, q_factor = _l2_factors(key), _l2_factors(query) * KEY_DIM**-0.5
        of_scores *= q_factor[:, None] * k_factor[None, :]
        of_keys *= k_factor
        of_values = k_factor * of_queries
        of_queries *= q_factor
    i = tl.arange(0, CHUNK)
    tl.store(
        scores + (rows[:, None] * NUM_HEADS + head) * CHUNK + i[None, :],
        of_scores.to(scores.dtype.element_ty),
        mask=is_row[:, None],
    )
    factors += (rows * NUM_HEADS + head) * 4
    tl.store(factors, of_values, mask=is_row)
    tl.store(factors + 1, of_queries, mask=is_row)
    tl.store(factors + 2, of_keys, mask=is_row)
    tl.store(factors + 3, tl.exp(last) + tl.zeros_like(sums), mask=is_row)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _solve_chunks(
    inverses,
    k,
    a,
    b,
    a_log,
    dt_bias,
    first_rows,
    num_rows,
    first_positions,
    stride_k,
    stride_k_head,
    stride_a,
    stride_a_head,
    stride_b,
    stride_b_head,
    KEY_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    SHARED: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    RATE_MAX: tl.constexpr,
):
    """Inverts 1 + the strictly lower part of beta D * K K^T for an inner chunk of a head, and
    multiplies column j by beta_j. The result is stored by rows."""
    span, head = tl.program_id(1), tl.program_id(2)
    rows, is_row = _rows_of_chunk(
        tl.program_id(0), span, first_rows, num_rows, first_positions, CHUNK
    )
    if tl.max(is_row.to(tl.int32), 0) == 0:
        return
    keys = tl.arange(0, KEYS)
    is_number = is_row[:, None] & (keys < KEY_DIM)[None, :]
    k += head // SHARED * stride_k_head
    key = tl.load(k + rows[:, None] * stride_k + keys[None, :], mask=is_number, other=0.0)
    gate = tl.load(a + rows * stride_a + head * stride_a_head, mask=is_row, other=0.0)
    _, log_decay = _steps(gate, a_log + head, dt_bias + head, 0.0, 0.0, True)
    _, system = _decays(tl.where(is_row, log_decay, 0.0), CHUNK)
    system *= product(key, tl.trans(key))
    k_factor = _l2_factors(key)
    beta = tl.load(b + rows * stride_b + head * stride_b_head, mask=is_row, other=0.0)
    beta = tl.where(is_row, tl.sigmoid(beta.to(tl.float32)) * RATE_MAX, 0.0)
    system *= (beta * k_factor)[:, None] * k_factor[None, :]
    i = tl.arange(0, CHUNK)
    system = tl.where(i[None, :] < i[:, None], system, 0.0)
    inverse = tl.where(i[None, :] == i[:, None], 1.0, 0.0)
    for row in range(1, CHUNK):
        # Row `row` of the system as a column, which is 0 from `row` on.
        of_row = tl.sum(tl.where(i[:, None] == row, system, 0.0), 0)
        solved = tl.sum(of_row[:, None] * inverse, 0)
        inverse = tl.where(i[:, None] == row, inverse - solved[None, :], inverse)
    tl.store(
        inverses + (rows[:, None] * NUM_HEADS + head) * CHUNK + i[None, :],
        (inverse * beta[None, :]).to(inverses.dtype.element_ty),
        mask=is_row[:, None],
    )


@triton.jit
def _l2_factors(x):
    """Returns the factors that norm the rows of x."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _scan_chunks(
    out,
    scores,
    inverses,
    factors,
    q,
    k,
    v,
    skip,
    states,
    first_rows,
    num_rows,
    first_positions,
    slots,
    stride_q,
    stride_q_head,
    stride_k,
    stride_k_head,
    stride_v,
    stride_v_head,
    stride_slot,
    stride_head,
    KEY_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHARED: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    IS_DELTA: tl.constexpr,
    CHUNK: tl.constexpr,
):
    span, head = tl.program_id(0), tl.program_id(1)
    num = tl.load(num_rows + span)
    if num == 0:
        return
    dtype: tl.constexpr = v.dtype.element_ty
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    keys = tl.arange(0, KEYS)
    is_column, is_key = columns < VALUE_DIM, keys < KEY_DIM
    is_state = is_key[:, None] & is_column[None, :]
    first_position = tl.load(first_positions + span)
    of_head = states + tl.load(slots + span).to(tl.int64) * stride_slot + head * stride_head
    in_state = keys[:, None] * VALUE_DIM + columns[None, :]
    state = tl.load(of_head + in_state, mask=is_state, other=0.0)
    state = tl.where(first_position > 0, state, 0.0)
    # The addresses of the span's first row. From there on, 32 bits are enough for offsets.
    first = tl.load(first_rows + span).to(tl.int64)
    q += first * stride_q + head // SHARED * stride_q_head
    k += first * stride_k + head // SHARED * stride_k_head
    v += first * stride_v + head * stride_v_head
    out += (first * NUM_HEADS + head) * VALUE_DIM
    scores += (first * NUM_HEADS + head) * CHUNK
    inverses += (first * NUM_HEADS + head) * CHUNK
    factors += (first * NUM_HEADS + head) * 4
    i = tl.arange(0, CHUNK)
    num_before = first_position % CHUNK  # positions of the first inner chunk before the span
    for chunk in range(tl.cdiv(num_before + num, CHUNK)):
        at = chunk * CHUNK - num_before + i
        is_row = (at >= 0) & (at < num)
        is_number = is_row[:, None] & is_key[None, :]
        is_value = is_row[:, None] & is_column[None, :]
        in_chunk = at[:, None] * (NUM_HEADS * CHUNK) + i[None, :]
        of_rows = factors + at * (NUM_HEADS * 4)
        key = tl.load(k + at[:, None] * stride_k + keys[None, :], mask=is_number, other=0.0)
        value = tl.load(v + at[:, None] * stride_v + columns[None, :], mask=is_value, other=0.0)
        of_values = tl.load(of_rows, mask=is_row, other=0.0)[:, None]
        narrow_state = state.to(dtype)
        written = value.to(tl.float32)
        if IS_DELTA:
            known = product(key, narrow_state) * of_values
            inverse = tl.load(inverses + in_chunk, mask=is_row[:, None], other=0.0)
            difference = (written - known).to(dtype)
            written = product(inverse, difference)
        else:
            written *= of_values
        query = tl.load(q + at[:, None] * stride_q + keys[None, :], mask=is_number, other=0.0)
        y = product(query, narrow_state)
        y *= tl.load(of_rows + 1, mask=is_row, other=0.0)[:, None]
        of_scores = tl.load(scores + in_chunk, mask=is_row[:, None], other=0.0)
        y += product(of_scores, written.to(dtype))
        if not IS_DELTA:
            y += value.to(tl.float32) * tl.load(skip + head).to(tl.float32)
        tl.store(
            out + at[:, None] * (NUM_HEADS * VALUE_DIM) + columns[None, :],
            y.to(dtype),
            mask=is_value,
        )
        of_keys = tl.load(of_rows + 2, mask=is_row, other=0.0)[:, None]
        state *= tl.max(tl.load(of_rows + 3, mask=is_row, other=0.0), 0)
        added = (written * of_keys).to(dtype)
        state += product(tl.trans(key), added)
    tl.store(of_head + in_state, state, mask=is_state)

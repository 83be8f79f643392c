"""Linear attention with a state: Gated DeltaNet (arXiv:2412.06464), Kimi Delta Attention
(arXiv:2510.26692) and Mamba 2 (arXiv:2405.21060).

A head keeps a matrix S [d_k, d_v] instead of keys and values. A token with query q, key k, value v
and decay exp(g) changes S and reads from it:

    S = exp(g) S + k w^T        y = S^T q

    Gated DeltaNet:  w = beta (v - exp(g) S^T k), with the S before the token
    Mamba 2:         w = v

Kimi Delta Attention is Gated DeltaNet in which each channel of a key has a decay of its own: g is
[d_k], and exp(g) S stands for diag(exp(g)) S.

Mamba 2 calls these C (q), B (k) and x; its v is dt x, and its g is dt A. Several heads may share
one q and k. All arithmetic is fp32, because a rounding error stays in the state.

There are two forms of the same computation:

- *recurrent*: token by token. A token's bits depend on nothing but its own sequence, if the number
  of rows T is a multiple of 16. (torch computes the last elements of a tensor with other
  instructions. So functions such as exp are applied to all rows at once.)
- *chunked*: inner chunks of 64 tokens, each computed by matrix products. An inner chunk begins at a
  position that is a multiple of 64. Only inner chunks that a step has whole are computed by
  products, and tokens before and after them one by one. So a token's bits depend on the step's
  boundaries only if these are not multiples of 64.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import softplus

INNER_CHUNK = 64
_BLOCK_ROWS = 16  # rows of an inner chunk that are computed at once with decays by channel
_L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class StateSpan:
    """The tokens that a step computes for one sequence, in consecutive rows of the step.

    The spans of a step have different slots. If `first_position` is 0, the sequence begins with a
    state of zeros, whatever the slot contains.
    """

    first_row: int
    num_rows: int
    first_position: int  # position of the first row in the sequence
    slot: int  # index of the sequence's state

    def part(self, first: int, end: int) -> "StateSpan":
        """Returns the span of the rows from `first` to before `end`, counted from the span's first
        row."""
        return StateSpan(
            self.first_row + first, end - first, self.first_position + first, self.slot
        )


class _Inputs(NamedTuple):
    """fp32 inputs of rows [T]. `beta` is None for Mamba 2."""

    q: torch.Tensor  # [T, heads, d_k]
    k: torch.Tensor  # [T, heads, d_k]
    v: torch.Tensor  # [T, heads, d_v]
    log_decay: torch.Tensor  # [T, heads, 1], or [T, heads, d_k] with a decay for each channel
    beta: torch.Tensor | None  # [T, heads]

    def rows(self, rows: torch.Tensor | slice) -> "_Inputs":
        beta = None if self.beta is None else self.beta[rows]
        return _Inputs(self.q[rows], self.k[rows], self.v[rows], self.log_decay[rows], beta)


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the log decays -exp(a_log) softplus(a + dt_bias) and the weights beta = sigmoid(b) of
    Gated DeltaNet. `a` and `b` are [T, heads], `a_log` and `dt_bias` are [heads]; the results are
    fp32 [T, heads]. For decays by channel, `a` is [T, heads, d_k], `a_log` [heads, 1], `dt_bias`
    [heads, d_k], and the log decays are [T, heads, d_k]."""
    log_decay = _decay_rates(a_log) * _softplus(a.float() + dt_bias.float())
    return log_decay, b.double().sigmoid().float()


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    spans: Sequence[StateSpan],
) -> torch.Tensor:
    """Computes Gated DeltaNet in the chunked form.

    q, k        [T, k heads, d_k], before the L2 norm and the factor 1 / sqrt(d_k)
    v           [T, v heads, d_v]; v head h uses q and k of head h // (v heads / k heads)
    log_decay   [T, v heads], at most 0; or [T, v heads, d_k] with a decay for each channel of a key
    beta        [T, v heads]
    states      fp32 [slots, v heads, d_k, d_v], with any strides. The spans' slots are updated in
                place.

    Returns y [T, v heads, d_v] in the dtype of v. Rows without a span are zeros.
    """
    return _chunked(_delta_inputs(q, k, v, log_decay, beta), states, spans).to(v.dtype)


def gated_delta_rule_recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    spans: Sequence[StateSpan],
) -> torch.Tensor:
    """Computes the same as `gated_delta_rule`, in the recurrent form."""
    return _recurrent(_delta_inputs(q, k, v, log_decay, beta), states, spans).to(v.dtype)


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
    spans: Sequence[StateSpan],
) -> torch.Tensor:
    """Computes Mamba 2 in the chunked form.

    x               [T, heads, head_dim]
    dt              [T, heads]; softplus(dt + dt_bias), within `dt_limits`, is the step size
    b, c            [T, groups, d_state]; consecutive heads share a group
    a_log, dt_bias  [heads]
    d               [heads]; d x is added to the output
    states          fp32 [slots, heads, d_state, head_dim], with any strides. The spans' slots are
                    updated in place. (transformers has [heads, head_dim, d_state].)

    Returns y [T, heads, head_dim] in the dtype of x. Rows without a span are d x.
    """
    inputs = _mamba2_inputs(x, dt, b, c, a_log, dt_bias, dt_limits)
    return _with_skip(_chunked(inputs, states, spans), x, d)


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
    spans: Sequence[StateSpan],
) -> torch.Tensor:
    """Computes the same as `mamba2`, in the recurrent form."""
    inputs = _mamba2_inputs(x, dt, b, c, a_log, dt_bias, dt_limits)
    return _with_skip(_recurrent(inputs, states, spans), x, d)


def _delta_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
) -> _Inputs:
    num_shared = v.shape[1] // k.shape[1]
    queries = _l2_normed(q.float()) * q.shape[-1] ** -0.5
    keys = _l2_normed(k.float())
    return _Inputs(
        queries.repeat_interleave(num_shared, 1),
        keys.repeat_interleave(num_shared, 1),
        v.float(),
        (log_decay if log_decay.dim() == 3 else log_decay.unsqueeze(-1)).float(),
        beta.float(),
    )


def _mamba2_inputs(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limits: tuple[float, float],
) -> _Inputs:
    num_shared = x.shape[1] // b.shape[1]
    step = _softplus(dt.float() + dt_bias.float()).clamp(*dt_limits)
    return _Inputs(
        c.float().repeat_interleave(num_shared, 1),
        b.float().repeat_interleave(num_shared, 1),
        x.float() * step.unsqueeze(-1),
        (_decay_rates(a_log) * step).unsqueeze(-1),
        None,
    )


def _decay_rates(a_log: torch.Tensor) -> torch.Tensor:
    """Returns -exp(a_log), fp32. It is computed in fp64, because the bits of an fp32 exp depend on
    the number of heads."""
    return -a_log.double().exp().float()


def _softplus(x: torch.Tensor) -> torch.Tensor:
    """Returns softplus(x), fp32, computed in fp64 for the same reason."""
    return softplus(x.double()).float()


def _with_skip(y: torch.Tensor, x: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    return (y + x.float() * d.float().unsqueeze(-1)).to(x.dtype)


def _l2_normed(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _L2_EPS).rsqrt()


def _recurrent(inputs: _Inputs, states: torch.Tensor, spans: Iterable[StateSpan]) -> torch.Tensor:
    """Computes the recurrent form, and returns y, fp32 [T, heads, d_v]. Spans with equally many
    rows are computed together."""
    out = torch.zeros_like(inputs.v, memory_format=torch.contiguous_format)
    decays = inputs.log_decay.exp()
    by_length = defaultdict(list)
    for span in spans:
        by_length[span.num_rows].append(span)
    for num_rows, alike in by_length.items():
        if num_rows == 0:
            continue
        slots = torch.tensor([span.slot for span in alike], device=states.device)
        rows = torch.tensor([span.first_row for span in alike], device=states.device)
        state = _first_states(states, slots, alike)
        for _ in range(num_rows):
            at = inputs.rows(rows)
            state = state * decays[rows].unsqueeze(-1)
            written = at.v
            if at.beta is not None:
                remembered = _sum_rows(state * at.k.unsqueeze(-1))
                written = (at.v - remembered) * at.beta.unsqueeze(-1)
            state = state + at.k.unsqueeze(-1) * written.unsqueeze(-2)
            out[rows] = _sum_rows(state * at.q.unsqueeze(-1))
            rows = rows + 1
        states[slots] = state
    return out


def _sum_rows(x: torch.Tensor) -> torch.Tensor:
    """Sums over the second last dimension. The order of additions depends on its size alone, while
    torch.sum chooses the order by the whole shape."""
    while (num := x.shape[-2]) > 1:
        half = num // 2
        halves = x[..., :half, :] + x[..., half : 2 * half, :]
        x = halves if num % 2 == 0 else torch.cat((halves, x[..., -1:, :]), -2)
    return x.squeeze(-2)


def _chunked(inputs: _Inputs, states: torch.Tensor, spans: Sequence[StateSpan]) -> torch.Tensor:
    """Computes the chunked form, and returns y, fp32 [T, heads, d_v]."""
    parts = [(span, _whole_chunks(span)) for span in spans]
    out = _recurrent(inputs, states, [span.part(0, first) for span, (first, _) in parts])
    for span, (first, end) in parts:
        if first < end:
            whole = span.part(first, end)
            rows = slice(whole.first_row, whole.first_row + whole.num_rows)
            state = _first_states(states, torch.tensor([span.slot]), [whole])[0]
            out[rows], states[span.slot] = _inner_chunks(inputs.rows(rows), state)
    return out.add_(
        _recurrent(inputs, states, [span.part(end, span.num_rows) for span, (_, end) in parts])
    )


def _whole_chunks(span: StateSpan) -> tuple[int, int]:
    """Returns the first row of the span's whole inner chunks, and the row after the last one.

    position   0        64       128      192
    span           [-----|--------|----]
    rows           0     first    end
    """
    first = -span.first_position % INNER_CHUNK
    if first > span.num_rows:
        return span.num_rows, span.num_rows
    return first, span.num_rows - (span.num_rows - first) % INNER_CHUNK


def _first_states(
    states: torch.Tensor, slots: torch.Tensor, spans: Sequence[StateSpan]
) -> torch.Tensor:
    """Returns the states with which spans begin, fp32 [spans, heads, d_k, d_v]."""
    first = states[slots]
    for i, span in enumerate(spans):
        if span.first_position == 0:
            first[i] = 0.0
    return first


def _inner_chunks(inputs: _Inputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes whole inner chunks of one sequence, with `state` [heads, d_k, d_v] before them.
    Returns y [rows, heads, d_v] and the state after them.

    With G the sum of g from the chunk's first token to a token, and D[i, j] = exp(G_i - G_j) for
    j <= i, the equations of all tokens of a chunk are

        y = exp(G) Q S + (D * Q K^T) W        S' = exp(G_last) S + (exp(G_last - G) K)^T W

        Gated DeltaNet:  (1 + strictly lower part of (beta D * K K^T)) W = beta (V - exp(G) K S)
        Mamba 2:         W = V

    With a decay for each channel, D[i, j] is a factor on each term of the sums over channels
    (`_products_by_channel`).
    """

    def by_chunk(x: torch.Tensor) -> torch.Tensor:  # [chunks, heads, INNER_CHUNK, ...]
        return x.reshape(-1, INNER_CHUNK, *x.shape[1:]).transpose(1, 2)

    q, k, v = (by_chunk(x) for x in (inputs.q, inputs.k, inputs.v))
    log_decay = by_chunk(inputs.log_decay).cumsum(-2)
    scores = _decayed_products(q, k, log_decay)
    read = q * log_decay.exp()
    reads_key = k * log_decay.exp()
    to_last = k * (log_decay[..., -1:, :] - log_decay).exp()
    of_chunk = log_decay[..., -1, :].exp().unsqueeze(-1)
    if inputs.beta is not None:
        beta = by_chunk(inputs.beta).unsqueeze(-1)
        system = beta * _decayed_products(k, k, log_decay)
    out = torch.empty_like(v)
    for chunk, value in enumerate(v):
        written = value
        if inputs.beta is not None:
            written = torch.linalg.solve_triangular(
                system[chunk],
                beta[chunk] * (value - reads_key[chunk] @ state),
                upper=False,
                unitriangular=True,
            )
        out[chunk] = read[chunk] @ state + scores[chunk] @ written
        state = of_chunk[chunk] * state + to_last[chunk].transpose(-1, -2) @ written
    return out.transpose(1, 2).flatten(0, 1), state


def _decayed_products(q: torch.Tensor, k: torch.Tensor, log_decay: torch.Tensor) -> torch.Tensor:
    """Returns the sums over c of q[i, c] k[j, c] exp(G[i, c] - G[j, c]) for j <= i, and 0 for
    j > i: [chunks, heads, INNER_CHUNK, INNER_CHUNK].

    q and k are [chunks, heads, INNER_CHUNK, d_k]. `log_decay` has the sums G, with a last dimension
    of 1 if all channels decay alike, else d_k.
    """
    if log_decay.shape[-1] == 1:
        decay = (log_decay - log_decay.transpose(-1, -2)).tril().exp().tril()
        return decay * (q @ k.transpose(-1, -2))
    # Chunk by chunk, because the pairs of rows take much memory.
    return torch.stack(list(map(_products_by_channel, q, k, log_decay)))


def _products_by_channel(q: torch.Tensor, k: torch.Tensor, log_decay: torch.Tensor) -> torch.Tensor:
    """Computes `_decayed_products` of one chunk, [heads, INNER_CHUNK, INNER_CHUNK], with a decay
    for each channel.

    exp(-G) alone may overflow. So the rows are divided into blocks. For a j before the block of i,
    the exponent is divided at the block's first row r: G_i - G_r and G_r - G_j are both at most 0.
    For a j in the same block, the terms of each pair (i, j) are computed without a matrix product.
    """
    products = q.new_zeros(len(q), INNER_CHUNK, INNER_CHUNK)
    is_later = torch.ones(_BLOCK_ROWS, _BLOCK_ROWS, dtype=torch.bool, device=q.device).triu(1)
    for first in range(0, INNER_CHUNK, _BLOCK_ROWS):
        block = slice(first, first + _BLOCK_ROWS)
        sums = log_decay[:, block]
        since_first = q[:, block] * (sums - sums[:, :1]).exp()
        until_first = k[:, :first] * (sums[:, :1] - log_decay[:, :first]).exp()
        products[:, block, :first] = since_first @ until_first.transpose(1, 2)
        exponents = sums.unsqueeze(2) - sums.unsqueeze(1)
        exponents.masked_fill_(is_later.unsqueeze(-1), -torch.inf)
        pairs = q[:, block].unsqueeze(2) * k[:, block].unsqueeze(1)
        products[:, block, block] = (pairs * exponents.exp()).sum(-1)
    return products

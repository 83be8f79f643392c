"""Random inputs for the kernels of layers with state: several sequences in one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch

from tandem_kernels.linear_attention import StateSpan, delta_gates

NUM_SLOTS = 7
# Sequences that begin, go on at and between multiples of 64, have one row, and have none. There are
# rows before the first span, and slots that no span names.
SPANS = (
    StateSpan(first_row=2, num_rows=1, first_position=5, slot=4),
    StateSpan(first_row=3, num_rows=130, first_position=0, slot=1),
    StateSpan(first_row=133, num_rows=150, first_position=100, slot=6),
    StateSpan(first_row=283, num_rows=0, first_position=9, slot=0),
    StateSpan(first_row=283, num_rows=1, first_position=0, slot=2),
    StateSpan(first_row=284, num_rows=20, first_position=70, slot=3),
)
NUM_ROWS = 304
UNNAMED = (0, 5)  # slots without rows


def cut(num_rows: int, cuts: tuple[int, ...], slot: int = 3) -> list[StateSpan]:
    """Returns the spans of one sequence that is computed in several steps."""
    edges = (0, *cuts, num_rows)
    return [StateSpan(a, b - a, a, slot) for a, b in pairwise(edges)]


@dataclass
class DeltaCase:
    """Inputs of Gated DeltaNet, or with `by_channel` of Kimi Delta Attention. Decays are such that
    a state lasts some hundred tokens."""

    num_rows: int = NUM_ROWS
    k_heads: int = 2
    v_heads: int = 4
    d_k: int = 32
    d_v: int = 48
    seed: int = 0
    dtype: torch.dtype = torch.float32
    by_channel: bool = False
    q: torch.Tensor = field(init=False)
    k: torch.Tensor = field(init=False)
    v: torch.Tensor = field(init=False)
    a: torch.Tensor = field(init=False)
    b: torch.Tensor = field(init=False)
    a_log: torch.Tensor = field(init=False)
    dt_bias: torch.Tensor = field(init=False)
    states: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=random)

        self.q, self.k = (
            normal(self.num_rows, self.k_heads, self.d_k).to(self.dtype) for _ in range(2)
        )
        self.v = normal(self.num_rows, self.v_heads, self.d_v).to(self.dtype)
        channels = (self.d_k,) if self.by_channel else ()
        self.a = normal(self.num_rows, self.v_heads, *channels)
        self.b = normal(self.num_rows, self.v_heads)
        self.a_log = normal(self.v_heads) - 3.0
        self.dt_bias = normal(self.v_heads, *channels) - 2.0
        self.states = normal(NUM_SLOTS, self.v_heads, self.d_k, self.d_v)

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The arguments of gated_delta_rule before the states."""
        a_log = self.a_log.unsqueeze(-1) if self.by_channel else self.a_log
        return (self.q, self.k, self.v, *delta_gates(self.a, self.b, a_log, self.dt_bias))


@dataclass
class Mamba2Case:
    num_rows: int = NUM_ROWS
    groups: int = 2
    heads: int = 4
    d_state: int = 32
    head_dim: int = 48
    seed: int = 0
    x: torch.Tensor = field(init=False)
    dt: torch.Tensor = field(init=False)
    b: torch.Tensor = field(init=False)
    c: torch.Tensor = field(init=False)
    a_log: torch.Tensor = field(init=False)
    d: torch.Tensor = field(init=False)
    dt_bias: torch.Tensor = field(init=False)
    states: torch.Tensor = field(init=False)
    dt_limits: tuple[float, float] = (0.05, 1.5)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=random)

        self.x = normal(self.num_rows, self.heads, self.head_dim)
        self.dt = normal(self.num_rows, self.heads)
        self.b, self.c = (
            normal(self.num_rows, self.groups, self.d_state) * self.d_state**-0.5 for _ in range(2)
        )
        self.a_log, self.d, self.dt_bias = (normal(self.heads) - shift for shift in (3.0, 0.0, 1.0))
        self.states = normal(NUM_SLOTS, self.heads, self.d_state, self.head_dim)

    @property
    def inputs(self) -> tuple[torch.Tensor | tuple[float, float], ...]:
        """The arguments of mamba2 before the states."""
        return (
            *(self.x, self.dt, self.b, self.c),
            *(self.a_log, self.d, self.dt_bias, self.dt_limits),
        )

"""The forms that a checkpoint's quantized matrices have, and which matrix has which. Loads no
torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

Coding = Literal["scaled", "packed", "gptq", "awq"]


@dataclass(frozen=True, slots=True)
class Scheme:
    """The form of a quantized matrix [out, in]; scales and zeros are the checkpoint's.

    scaled: `weight` in fp8 or int8, and `weight_scale` or `weight_scale_inv`.
    packed: `weight_packed` and `weight_scale` of compressed-tensors, and `weight_zero_point`.
    gptq, awq: `qweight`, `qzeros` and `scales`, of [in, out].
    """

    coding: Coding
    bits: int
    is_float: bool = False
    group_size: int = 0  # inputs that share a scale; 0: all of a row or of the matrix
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale
    zero_offset: int = 0  # what is added to stored zeros
    has_zeros: bool = False  # of packed: else each is the middle of the range

    @property
    def growth_max(self) -> float:
        """Returns by how much a matrix may grow when it is repacked. Integers become blocks with a
        scale, and a zero, for each 32 inputs or 64. In fp8 each output gets scales."""
        if self.is_float:
            return 1.04
        return 4.5 / 4 if self.bits == 4 else 8.5 / 8


@dataclass(frozen=True, slots=True)
class Quantization:
    """The scheme of each module, if it is quantized: that, the tensors of the files tell.

    A module's own name goes before patterns, and these before the scheme of all others.
    """

    of_others: Scheme | None = None  # None: they are not quantized
    by_name: Mapping[str, Scheme] = field(default_factory=dict)
    by_pattern: tuple[tuple[re.Pattern[str], Scheme], ...] = ()  # of a name's begin; the first wins

    def of(self, module: str) -> Scheme | None:
        """Returns the scheme of a module, such as model.layers.0.mlp.up_proj."""
        if module in self.by_name:
            return self.by_name[module]
        matches = (scheme for pattern, scheme in self.by_pattern if pattern.match(module))
        return next(matches, self.of_others)

    @property
    def is_float(self) -> bool:
        """True if all quantized matrices are in fp8."""
        return all(scheme.is_float for scheme in self._schemes())

    @property
    def growth_max(self) -> float:
        """Returns by how much the matrices may grow together when they are repacked."""
        return max(scheme.growth_max for scheme in self._schemes())

    def _schemes(self) -> Iterator[Scheme]:
        patterns = (scheme for _, scheme in self.by_pattern)
        others = () if self.of_others is None else (self.of_others,)
        return chain(self.by_name.values(), patterns, others)

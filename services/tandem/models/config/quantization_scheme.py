"""Describes how a checkpoint stores quantized matrices, and which format each module has. Does not
import torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

Coding = Literal["scaled", "packed", "fp4", "gptq", "awq"]


@dataclass(frozen=True, slots=True)
class Scheme:
    """The storage format of a quantized matrix [out, in]. For each coding, the checkpoint has these
    tensors:

    scaled: `weight` in fp8 or int8, and `weight_scale` or `weight_scale_inv`.
    packed: `weight_packed`, `weight_scale` and `weight_zero_point` (compressed-tensors).
    fp4: `weight_packed` and `weight_scale` (compressed-tensors). Numbers are E2M1. With groups of
        16 inputs (NVFP4), scales are E4M3 and there is `weight_global_scale`, by which they are
        divided. With groups of 32 (MXFP4), scales are powers of 2.
    gptq, awq: `qweight`, `qzeros` and `scales`, stored as [in, out].
    """

    coding: Coding
    bits: int
    is_float: bool = False
    # Number of consecutive inputs of a row that share a scale. 0: all inputs of a row, or all
    # weights of the matrix, share a scale.
    group_size: int = 0
    # (outputs, inputs) of a block of weights that share a scale, such as (128, 128). None: scales
    # are not per block.
    block: tuple[int, int] | None = None
    # Number that is added to each stored zero point. It is 1 if files store each zero point minus
    # 1.
    zero_offset: int = 0
    # Only for the coding "packed". True: zero points are stored. False: all zero points are the
    # middle of the range of numbers, such as 8 with 4 bits.
    has_zeros: bool = False

    @property
    def growth_max(self) -> float:
        """Largest ratio of a matrix's size in memory to its size in the file.

        In memory, integers are stored in blocks of 32 or 64 inputs. Each block has a scale and
        possibly a zero point. Example: 32 weights of 4 bits and a scale of 2 bytes take 4.5 bits
        per weight. fp8 matrices have scales for each output."""
        if self.is_float:
            return 1.04
        if self.coding == "fp4" and self.group_size == 16:  # It becomes bfloat16.
            return 16 / 4.5
        return 4.5 / 4 if self.bits == 4 else 8.5 / 8


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization scheme of each module. A module with a scheme may still be stored
    unquantized; the tensors in the files show this.

    `by_name` has priority over `by_pattern`, and `by_pattern` over `default`.
    """

    # Scheme of modules that `by_name` and `by_pattern` do not match. None: not quantized.
    default: Scheme | None = None
    by_name: Mapping[str, Scheme] = field(default_factory=dict)
    # Patterns are matched at the start of a module's name, and the first match wins.
    by_pattern: tuple[tuple[re.Pattern[str], Scheme], ...] = ()

    def of(self, module: str) -> Scheme | None:
        """Returns the scheme of a module, such as model.layers.0.mlp.up_proj; None if it has
        none."""
        if module in self.by_name:
            return self.by_name[module]
        matches = (scheme for pattern, scheme in self.by_pattern if pattern.match(module))
        return next(matches, self.default)

    @property
    def is_float(self) -> bool:
        """True if all quantized matrices are in fp8."""
        return all(scheme.is_float for scheme in self._schemes())

    @property
    def growth_max(self) -> float:
        """Upper bound, over all matrices, of the size in memory divided by the size in the
        files."""
        return max(scheme.growth_max for scheme in self._schemes())

    def _schemes(self) -> Iterator[Scheme]:
        patterns = (scheme for _, scheme in self.by_pattern)
        others = () if self.default is None else (self.default,)
        return chain(self.by_name.values(), patterns, others)

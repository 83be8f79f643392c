"""Integers in groups of inputs with a scale, and the same as blocks of GGUF's types.

    weight = (number - zero) * scale

The blocks have groups of 32 inputs and scales of float16. Where no zero is another than 8 they are
Q4_0; int8 becomes Q8_0. Numbers of 4 bits with other zeros become blocks of 64 inputs that have a
zero, or of 32 where the groups are no larger. A block stands for the very numbers that the file
does, or there is none. If the groups are of inputs that do not follow one another, the blocks have
the inputs in the order of their groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import torch

from tandem.models.checkpoint.quantized.packed_groups import PackedGroups
from tandem.models.gguf.tensors import Blocks, BlocksType, ZeroedType

BLOCK = 32
_ZEROED_MOST = 64  # inputs of a block that has a zero


@dataclass(frozen=True, slots=True)
class QuantizedGroups:
    """A matrix [out, in]; each output has `scales.shape[1]` groups of inputs."""

    numbers: torch.Tensor  # [out, in]: uint8 of 0 to 15, or int8
    zeros: torch.Tensor  # [out, groups] or [1, 1]: uint8 of 0 to 16
    scales: torch.Tensor  # [out, groups] or [1, 1], float32
    group_of_input: torch.Tensor | None = None  # [in]; None: as many inputs after one another each

    def values(self) -> torch.Tensor:
        """Returns float32 [out, in]."""
        zeros = self._of_inputs(self.zeros).short()
        return (self.numbers.short() - zeros) * self._of_inputs(self.scales)

    def blocks(self) -> Blocks | None:
        """Returns blocks of exactly these values; None if there are none such."""
        num_out, num_in = self.numbers.shape
        group_inputs = num_in // self.scales.shape[1]
        if num_in % BLOCK or group_inputs % BLOCK or not self._are_of_one_size():
            return None
        if not torch.equal(self.scales.half().float(), self.scales):
            return None
        order = self.group_of_input
        if order is not None:
            order = order.argsort(stable=True).int()
        numbers = self.numbers if order is None else self.numbers[:, order]
        if numbers.dtype == torch.int8:
            data = numbers.contiguous().view(torch.uint8).view(num_out, -1, BLOCK)
            kind = gguf.GGMLQuantizationType.Q8_0
            return self._of_type(kind, self._scales(BLOCK), data, order=order)
        halves = _halves(numbers.reshape(num_out, -1, BLOCK))
        if bool((self.zeros == 8).all()):
            kind = gguf.GGMLQuantizationType.Q4_0
            return self._of_type(kind, self._scales(BLOCK), halves, order=order)
        size = BLOCK if group_inputs % _ZEROED_MOST else _ZEROED_MOST
        zeroed = ZeroedType.Q4_Z32 if size == BLOCK else ZeroedType.Q4_Z64
        parts = self._scales(size), self._in_blocks(self.zeros, size)
        return self._of_type(zeroed, *parts, halves.view(num_out, -1, size // 2), order=order)

    def packed(self) -> PackedGroups:
        """Returns exactly these values, as torch and Triton keep them."""
        zeros = None if self.numbers.dtype == torch.int8 else self.zeros
        return PackedGroups.of(self.numbers, self.scales, zeros, self.group_of_input)

    def _of_inputs(self, of_groups: torch.Tensor) -> torch.Tensor:
        if of_groups.shape[1] == 1:
            return of_groups
        if self.group_of_input is not None:
            return of_groups[:, self.group_of_input]
        return of_groups.repeat_interleave(self.numbers.shape[1] // of_groups.shape[1], 1)

    def _are_of_one_size(self) -> bool:
        if self.group_of_input is None:
            return True
        num_groups = self.scales.shape[1]
        sizes = self.group_of_input.bincount(minlength=num_groups)
        return bool((sizes == self.numbers.shape[1] // num_groups).all())

    def _in_blocks(self, of_groups: torch.Tensor, size: int) -> torch.Tensor:
        """Returns what each block of so many inputs has, [out, blocks, 1]."""
        num_out, num_in = self.numbers.shape
        of_groups = of_groups.expand(num_out, -1)
        return of_groups.repeat_interleave(num_in // size // of_groups.shape[1], 1).unsqueeze(-1)

    def _scales(self, size: int) -> torch.Tensor:
        """Returns the bytes of each block's scale, [out, blocks, 2]."""
        return self._in_blocks(self.scales.half(), size).contiguous().view(torch.uint8)

    def _of_type(
        self, kind: BlocksType, *parts: torch.Tensor, order: torch.Tensor | None = None
    ) -> Blocks:
        data = torch.cat(parts, -1).flatten(1)
        return Blocks(data, kind, tuple(self.numbers.shape), order=order)


def _halves(numbers: torch.Tensor) -> torch.Tensor:
    """Returns bytes, of which the lower halves are a block's first 16 numbers."""
    first, last = numbers.chunk(2, dim=-1)
    return first | last << 4

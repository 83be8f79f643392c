"""Group-quantized integer matrices, and their conversion to GGUF blocks.

    weight = (number - zero) * scale

Each weight is stored as an integer, the number. A group of inputs shares a zero point and a scale.
GGUF blocks have float16 scales. The block type depends on the matrix:
- int8 becomes Q8_0 (32 inputs).
- 4 bits with all zero points equal to 8 becomes Q4_0 (32 inputs).
- 4 bits with other zero points becomes Q4_Z64 (64 inputs and a zero point), or Q4_Z32 if the groups
  are not multiples of 64 inputs.

A matrix that no block type represents exactly is not converted. If the inputs of a group are not
consecutive, the inputs are sorted by group before they are stored. For example, if inputs 0 and 2
are in group 0 and inputs 1 and 3 in group 1, the stored order is 0, 2, 1, 3. `GgufBlocks.order`
records this order.
"""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import torch

from tandem.models.checkpoint.quantized.packed_groups import PackedGroups
from tandem.models.gguf.tensors import BlocksType, GgufBlocks, ZeroedType

BLOCK = 32
_ZEROED_MOST = 64  # number of inputs in a Q4_Z64 block


@dataclass(frozen=True, slots=True)
class QuantizedGroups:
    """A quantized matrix [out, in]. Each row is divided into `scales.shape[1]` groups of inputs.
    The weights of one row and one group share a scale and a zero point."""

    numbers: torch.Tensor  # [out, in]: uint8 from 0 to 15 for 4 bits, int8 for 8 bits
    zeros: torch.Tensor  # [out, groups] or [1, 1]: zero points, uint8 from 0 to 16
    scales: torch.Tensor  # [out, groups] or [1, 1], float32
    # [in]: for each input, the index of its group. None: all groups have the same size and consist
    # of consecutive inputs.
    group_of_input: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """Returns the dequantized matrix, float32 [out, in]."""
        zeros = self._per_input(self.zeros).short()
        return (self.numbers.short() - zeros) * self._per_input(self.scales)

    def blocks(self) -> GgufBlocks | None:
        """Converts to GGUF blocks with exactly the same values; returns None if that is
        impossible."""
        num_out, num_in = self.numbers.shape
        group_inputs = num_in // self.scales.shape[1]
        if num_in % BLOCK or group_inputs % BLOCK or not self._have_equal_size():
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
        parts = self._scales(size), self._per_block(self.zeros, size)
        return self._of_type(zeroed, *parts, halves.view(num_out, -1, size // 2), order=order)

    def packed(self) -> PackedGroups | None:
        """Converts to the format of the torch and Triton kernels, with exactly the same values;
        returns None if the groups have different sizes."""
        zeros = None if self.numbers.dtype == torch.int8 else self.zeros
        return PackedGroups.of(self.numbers, self.scales, zeros, self.group_of_input)

    def _per_input(self, per_group: torch.Tensor) -> torch.Tensor:
        if per_group.shape[1] == 1:
            return per_group
        if self.group_of_input is not None:
            return per_group[:, self.group_of_input]
        return per_group.repeat_interleave(self.numbers.shape[1] // per_group.shape[1], 1)

    def _have_equal_size(self) -> bool:
        if self.group_of_input is None:
            return True
        num_groups = self.scales.shape[1]
        sizes = self.group_of_input.bincount(minlength=num_groups)
        return bool((sizes == self.numbers.shape[1] // num_groups).all())

    def _per_block(self, per_group: torch.Tensor, size: int) -> torch.Tensor:
        """Repeats each group's value for the blocks of `size` inputs in the group. The result has
        the shape [out, blocks, 1]."""
        num_out, num_in = self.numbers.shape
        per_group = per_group.expand(num_out, -1)
        return per_group.repeat_interleave(num_in // size // per_group.shape[1], 1).unsqueeze(-1)

    def _scales(self, size: int) -> torch.Tensor:
        """Returns each block's float16 scale as bytes, uint8 [out, blocks, 2]."""
        return self._per_block(self.scales.half(), size).contiguous().view(torch.uint8)

    def _of_type(
        self, kind: BlocksType, *parts: torch.Tensor, order: torch.Tensor | None = None
    ) -> GgufBlocks:
        data = torch.cat(parts, -1).flatten(1)
        return GgufBlocks(data, kind, tuple(self.numbers.shape), order=order)


def _halves(numbers: torch.Tensor) -> torch.Tensor:
    """Packs blocks of 32 4-bit numbers into 16 bytes each. In byte i, the low nibble is number i of
    the block, and the high nibble is number i + 16."""
    first, last = numbers.chunk(2, dim=-1)
    return first | last << 4

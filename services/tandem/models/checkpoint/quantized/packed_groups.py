"""Group-quantized integer matrices in the format of the torch and Triton kernels.

    weight = (number - zero) * scale + min

Each weight is stored as an integer, the number. A group of inputs shares a scale, and optionally a
zero point and a minimum. Scales are converted to 16 bits only if all scales stay exactly the same.
So each weight is equal to the weight in the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tandem.models.gguf.tensors import GgufBlocks

BLOCK = 32  # number of inputs in a GGUF block
# Maximum number of weights that a CPU dequantizes in one pass, to limit temporary memory. It
# applies only if the inputs of a group are not consecutive.
_SHUFFLED_AT_ONCE = 1 << 16
_SCALE_TYPES = (torch.float16, torch.bfloat16)
# GGUF block type -> sizes in bytes of the fields before a block's weights: the scale, and the
# minimum if the type has one.
_PARTS = {"Q8_0": (2,), "Q4_0": (2,), "Q4_1": (2, 2)}


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """A group-quantized matrix [out, in]."""

    # 4-bit numbers: uint8 [out, in / 2], with input 2 * i in the low nibble of byte i, and input
    # 2 * i + 1 in the high nibble. 8-bit numbers: int8 [out, in].
    data: torch.Tensor
    scales: torch.Tensor  # [out, groups]
    zeros: torch.Tensor | None = None  # uint8 [out, groups]; None: all zero points are 0
    mins: torch.Tensor | None = None  # [out, groups]; None: all minimums are 0
    # [in]: for each input, the index of its group. None: all groups have the same size and consist
    # of consecutive inputs.
    group_of_input: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        numbers: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None = None,
        group_of_input: torch.Tensor | None = None,
    ) -> PackedGroups:
        """Packs a matrix of numbers [out, in]: 4-bit numbers in uint8, or int8 numbers. `scales`
        and `zeros` have one value per group, one per row, or one for the whole matrix."""
        num_out = len(numbers)
        scales = scales.expand(num_out, -1)
        data = numbers
        if numbers.dtype == torch.uint8:
            data = numbers[:, 1::2] << 4
            data |= numbers[:, ::2]
        data = data.contiguous()
        if zeros is not None:
            zeros = zeros.expand(num_out, scales.shape[1]).contiguous()
        return cls(data, _narrowed(scales).contiguous(), zeros, None, group_of_input)

    @classmethod
    def of_blocks(cls, blocks: GgufBlocks) -> PackedGroups | None:
        """Converts GGUF blocks of type Q8_0, Q4_0 or Q4_1 without a change of values. Returns None
        for other block types."""
        parts = _PARTS.get(blocks.type.name)
        if parts is None:
            return None
        num_out, num_in = blocks.shape
        rows = blocks.rows().view(num_out, num_in // BLOCK, -1)
        scales, *mins, packed = torch.split(rows, [*parts, rows.shape[-1] - sum(parts)], -1)
        halves = [part.contiguous().view(torch.float16).squeeze(-1) for part in (scales, *mins)]
        if blocks.type.name == "Q8_0":
            numbers = packed.reshape(num_out, num_in).view(torch.int8)
            return cls(numbers, halves[0])
        numbers = torch.cat((packed & 15, packed >> 4), -1).flatten(1)
        data = numbers[:, ::2] | numbers[:, 1::2] << 4
        zeros = None if mins else torch.full_like(halves[0], 8, dtype=torch.uint8)
        return cls(data, halves[0], zeros, *halves[1:])

    @property
    def shape(self) -> tuple[int, ...]:
        num_out, num_bytes = self.data.shape
        return num_out, num_bytes * (2 if self.data.dtype == torch.uint8 else 1)

    def numbers(self) -> torch.Tensor:
        """Returns the dequantized matrix, float32 [out, in]."""
        num_out, num_in = self.shape
        numbers = torch.empty(num_out, num_in, device=self.data.device)
        at_once = num_out
        if self.group_of_input is not None and self.data.is_cpu:
            at_once = max(1, _SHUFFLED_AT_ONCE // num_in)
        for first in range(0, num_out, at_once):
            end = min(first + at_once, num_out)
            self.between(first, end)._write(numbers[first:end])
        return numbers

    def in_order(self, rows: torch.Tensor) -> PackedGroups:
        """Returns a copy of the rows with the indices `rows`, in that order."""
        return replace(
            self,
            data=self.data[rows],
            scales=self.scales[rows],
            zeros=None if self.zeros is None else self.zeros[rows],
            mins=None if self.mins is None else self.mins[rows],
        )

    def between(self, first: int, end: int) -> PackedGroups:
        """Returns the rows [first, end) as a view of the same memory."""
        return replace(
            self,
            data=self.data[first:end],
            scales=self.scales[first:end],
            zeros=None if self.zeros is None else self.zeros[first:end],
            mins=None if self.mins is None else self.mins[first:end],
        )

    def to(self, device: torch.device) -> PackedGroups:
        def moved(part: torch.Tensor | None) -> torch.Tensor | None:
            return None if part is None else part.to(device)

        return PackedGroups(
            self.data.to(device),
            self.scales.to(device),
            moved(self.zeros),
            moved(self.mins),
            moved(self.group_of_input),
        )

    def _write(self, wide: torch.Tensor) -> None:
        """Dequantizes into `wide`, float32 [out, in]."""
        if self.data.dtype == torch.uint8:
            torch.stack((self.data & 15, self.data >> 4), -1, out=wide.view(*self.data.shape, 2))
        else:
            wide.copy_(self.data)
        # Without `group_of_input`, `wide` is viewed as [out, groups, inputs of a group].
        if self.group_of_input is None:
            wide = wide.view(*self.scales.shape, -1)
        if self.zeros is not None:
            wide -= self._per_input(self.zeros)
        wide *= self._per_input(self.scales)
        if self.mins is not None:
            wide += self._per_input(self.mins)

    def _per_input(self, per_group: torch.Tensor) -> torch.Tensor:
        if self.group_of_input is not None:
            return per_group.gather(1, self.group_of_input.expand(len(per_group), -1))
        return per_group.unsqueeze(-1)


def _narrowed(scales: torch.Tensor) -> torch.Tensor:
    """Returns the scales in a 16-bit type that represents all of them exactly; returns them
    unchanged if there is no such type."""
    for dtype in _SCALE_TYPES:
        narrow = scales.to(dtype)
        if torch.equal(narrow.float(), scales.float()):
            return narrow
    return scales

"""Group-quantized matrices in the format of the torch and Triton kernels.

    weight = (number - zero) * scale + min

Each weight is stored as a number of 4 or 8 bits. A group of inputs shares a scale, and optionally a
zero point and a minimum. Scales are converted to 16 bits only if all scales stay exactly the same.
So each weight is equal to the weight in the checkpoint.

The values of groups, such as scales, are [out, groups] tensors that are stored column by column:
the values of consecutive outputs are consecutive in memory, as the Triton kernels read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from tandem.models.gguf.tensors import GgufBlocks
from tandem_kernels.blocks import e2m1, split

# Number of inputs of a block. Byte i of a block of 4-bit numbers has number i in the low nibble,
# and number i + 16 in the high nibble, as in GGUF's blocks.
BLOCK = 32
_SCALE_TYPES = (torch.float16, torch.bfloat16)
# The fields with the values of groups and blocks.
_OF_GROUPS = ("scales", "zeros", "mins", "block_scales", "block_mins")


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """A group-quantized matrix [out, in]."""

    # 4-bit numbers: uint8 [out, in / 2], in blocks of 32 inputs (`BLOCK`). 8-bit numbers: int8
    # [out, in]. The 4-bit numbers are integers, or E2M1 if the scales are float8_e8m0fnu (MXFP4).
    data: torch.Tensor
    scales: torch.Tensor  # [out, groups]; integers if there are `block_scales`
    zeros: torch.Tensor | None = None  # uint8 [out, groups]; None: all zero points are 0
    mins: torch.Tensor | None = None  # [out, groups], like scales; None: all minimums are 0
    # float16 [out, blocks]: factors of the scales and of the mins. A block has several consecutive
    # groups. None: the factors are 1.
    block_scales: torch.Tensor | None = None
    block_mins: torch.Tensor | None = None
    # int32 [in]: number p of a row is the weight of input order[p]. None: the numbers are in the
    # order of the inputs.
    order: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        numbers: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None = None,
        group_of_input: torch.Tensor | None = None,
    ) -> PackedGroups | None:
        """Packs a matrix of numbers [out, in]: 4-bit numbers in uint8, or int8 numbers. `scales`
        and `zeros` have one value per group, one per row, or one for the whole matrix.

        If `group_of_input` [in] has the group of each input, the inputs are sorted by group.
        Returns None if the groups have different sizes.
        """
        num_out, num_in = numbers.shape
        scales = scales.expand(num_out, -1)
        num_groups = scales.shape[1]
        order = None
        if group_of_input is not None:
            sizes = group_of_input.bincount(minlength=num_groups)
            if not bool((sizes == num_in // num_groups).all()):
                return None
            order = group_of_input.argsort(stable=True).int()
            numbers = numbers[:, order]
        if zeros is not None:
            zeros = by_columns(zeros.expand(scales.shape))
        return cls(_packed(numbers), by_columns(_narrowed(scales)), zeros, order=order)

    @classmethod
    def of_blocks(cls, blocks: GgufBlocks) -> PackedGroups:
        """Converts quantized GGUF blocks [..., out, in] without a change of values. The rows of
        several matrices follow one another."""
        parts = split(blocks.rows(), blocks.type)
        numbers, zeros = parts.numbers.flatten(1), None
        is_four_bits = blocks.type.name in ("Q4_0", "Q4_1", "Q4_K", "MXFP4")
        if not is_four_bits:
            numbers = (numbers - parts.zeros).view(torch.int8)
        elif parts.zeros:
            zeros = by_columns(torch.full_like(parts.scales.flatten(1), 8, dtype=torch.uint8))

        def of_rows(part: torch.Tensor | None) -> torch.Tensor | None:
            return None if part is None else by_columns(part.flatten(1))

        return cls(
            _packed(numbers),
            by_columns(parts.scales.flatten(1)),
            zeros,
            *map(of_rows, (parts.mins, parts.block_scales, parts.block_mins)),
        )

    @classmethod
    def joined(cls, parts: Sequence[PackedGroups]) -> PackedGroups | None:
        """Returns one matrix with the rows of several matrices, one after the other. Returns None
        if their formats or the orders of their inputs differ."""
        first = parts[0]
        for part in parts[1:]:
            is_ordered_alike = first.order is part.order is None or (
                first.order is not None
                and part.order is not None
                and torch.equal(first.order, part.order)
            )
            if not is_ordered_alike or _format_of(part) != _format_of(first):
                return None
        columns = {
            name: torch.cat([_bytes_of(getattr(part, name)).t() for part in parts], 1)
            .view(of_first.dtype)
            .t()
            for name in _OF_GROUPS
            if (of_first := getattr(first, name)) is not None
        }
        return replace(first, data=torch.cat([part.data for part in parts]), **columns)

    @property
    def shape(self) -> tuple[int, ...]:
        num_out, num_bytes = self.data.shape
        return num_out, num_bytes * (2 if self.data.dtype == torch.uint8 else 1)

    def numbers(self) -> torch.Tensor:
        """Returns the dequantized matrix, float32 [out, in]."""
        if self.data.dtype == torch.uint8:
            blocks = self.data.view(len(self.data), -1, BLOCK // 2)
            numbers = torch.cat((blocks & 15, blocks >> 4), -1)
            is_e2m1 = self.scales.dtype == torch.float8_e8m0fnu
            wide = e2m1(numbers) if is_e2m1 else numbers.float()
        else:
            wide = self.data.float()
        wide = wide.view(*self.scales.shape, -1)
        if self.zeros is not None:
            wide -= self.zeros.unsqueeze(-1)
        wide *= _multiplied(self.scales, self.block_scales)
        if self.mins is not None:
            wide += _multiplied(self.mins, self.block_mins)
        wide = wide.view(self.shape)
        if self.order is None:
            return wide
        ordered = torch.empty_like(wide)
        ordered[:, self.order.long()] = wide
        return ordered

    def in_order(self, rows: torch.Tensor) -> PackedGroups:
        """Returns a copy of the rows with the indices `rows`, in that order."""
        columns = self._columns(
            lambda part: _bytes_of(part).t().index_select(1, rows).t().view(part.dtype)
        )
        return replace(self, data=self.data[rows], **columns)

    def between(self, first: int, end: int) -> PackedGroups:
        """Returns the rows [first, end) as a view of the same memory."""
        columns = self._columns(lambda part: part[first:end])
        return replace(self, data=self.data[first:end], **columns)

    def to(self, device: torch.device) -> PackedGroups:
        columns = self._columns(lambda part: part.to(device))
        order = None if self.order is None else self.order.to(device)
        return replace(self, data=self.data.to(device), order=order, **columns)

    def _columns(self, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the values of groups and blocks by name, each after `change`."""
        parts = {name: getattr(self, name) for name in _OF_GROUPS}
        return {name: change(part) for name, part in parts.items() if part is not None}


def by_columns(of_groups: torch.Tensor) -> torch.Tensor:
    """Returns the same [out, groups] tensor, stored column by column."""
    return of_groups.t().contiguous().t()


def _packed(numbers: torch.Tensor) -> torch.Tensor:
    """Returns `PackedGroups.data` of numbers [out, in]. 4-bit numbers take a byte each if the
    inputs do not divide into blocks."""
    if numbers.dtype == torch.int8 or numbers.shape[1] % BLOCK:
        return numbers.contiguous().view(torch.int8)
    first, last = numbers.view(len(numbers), -1, BLOCK).chunk(2, -1)
    return (first | last << 4).flatten(1)


def _format_of(groups: PackedGroups) -> list[tuple[torch.dtype, torch.Size] | None]:
    """Returns what two matrices must have in common if their rows may follow one another."""
    each = (getattr(groups, name) for name in ("data", *_OF_GROUPS))
    return [None if part is None else (part.dtype, part.shape[1:]) for part in each]


def _bytes_of(part: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of 8-bit floating-point numbers, with which torch has more operations;
    returns other tensors unchanged."""
    return part.view(torch.uint8) if part.dtype == torch.float8_e8m0fnu else part


def _multiplied(of_groups: torch.Tensor, of_blocks: torch.Tensor | None) -> torch.Tensor:
    """Returns the scales or the mins of groups, float32 [out, groups, 1]."""
    wide = of_groups.float()
    if of_blocks is not None:
        groups = len(wide), of_blocks.shape[1], -1
        wide = (wide.reshape(groups) * of_blocks.float().unsqueeze(-1)).view(wide.shape)
    return wide.unsqueeze(-1)


def _narrowed(scales: torch.Tensor) -> torch.Tensor:
    """Returns the scales in a 16-bit type that represents all of them exactly; returns them
    unchanged if there is no such type."""
    for dtype in _SCALE_TYPES:
        narrow = scales.to(dtype)
        if torch.equal(narrow.float(), scales.float()):
            return narrow
    return scales

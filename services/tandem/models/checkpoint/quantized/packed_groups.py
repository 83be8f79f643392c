"""Group-quantized matrices in the format of the torch and Triton kernels.

    weight = (number - zero) * scale + min

Each weight is stored as a number of 4, 5, 6 or 8 bits. A group of inputs shares a scale, and
optionally a zero point and a minimum. Scales are converted to 16 bits only if all scales stay
exactly the same. So each weight is equal to the weight in the checkpoint.

The values of groups, such as scales, are [out, groups] tensors that are stored column by column:
the values of consecutive outputs are consecutive in memory, as the Triton kernels read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tandem.models.gguf.tensors import GgufBlocks
from tandem_kernels.blocks import e2m1, split

# Number of inputs of a block. Byte i of a block of 4-bit numbers has number i in the low nibble,
# and number i + 16 in the high nibble, as in GGUF's blocks.
BLOCK = 32
_HALF = BLOCK // 2
_SCALE_TYPES = (torch.float16, torch.bfloat16)
_HIGH_BITS = {"Q5_0": 1, "Q5_1": 1, "Q5_K": 1, "Q6_K": 2}  # by GGUF block type; others: 0
_OF_ROWS = ("data", "high")  # fields with the numbers of a row
# The fields with the values of groups and blocks.
_OF_GROUPS = ("scales", "zeros", "mins", "block_scales", "block_mins")


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """A group-quantized matrix [out, in]."""

    # 8-bit numbers: int8 [out, in]. Others: the lowest 4 bits of each number, uint8 [out, in / 2],
    # in blocks of 32 inputs (`BLOCK`). Numbers are integers, or E2M1 if the scales are
    # float8_e8m0fnu (MXFP4).
    data: torch.Tensor
    scales: torch.Tensor  # [out, groups]; integers if there are `block_scales`
    zeros: torch.Tensor | None = None  # uint8 [out, groups]; None: all zero points are `zero`
    mins: torch.Tensor | None = None  # [out, groups], like scales; None: all minimums are 0
    # float16 [out, blocks]: factors of the scales and of the mins. A block has several consecutive
    # groups. None: the factors are 1.
    block_scales: torch.Tensor | None = None
    block_mins: torch.Tensor | None = None
    # uint8 [out, bytes]: the other bits of 5-bit and 6-bit numbers, for several blocks of `data` at
    # a time: four blocks with one bit of each number, or two blocks with two bits. Byte i has the
    # bits of the numbers i and i + 16 of the first block, then of the second, from the lowest bit.
    high: torch.Tensor | None = None
    high_bits: int = 0  # bits of each number in `high`
    zero: int = 0
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
        zero = 0
        if zeros is not None and zeros.numel() == 1:
            zero, zeros = int(zeros), None
        elif zeros is not None:
            zeros = by_columns(zeros.expand(scales.shape))
        scales = by_columns(_narrowed(scales))
        return cls(_packed(numbers), scales, zeros, zero=zero, order=order)

    @classmethod
    def of_blocks(cls, blocks: GgufBlocks) -> PackedGroups:
        """Converts quantized GGUF blocks [..., out, in] without a change of values. The rows of
        several matrices follow one another."""
        parts = split(blocks.rows(), blocks.type)
        assert isinstance(parts.zeros, int)

        def of_rows(part: torch.Tensor | None) -> torch.Tensor | None:
            return None if part is None else by_columns(part.flatten(1))

        high_bits = _HIGH_BITS.get(blocks.type.name, 0)
        numbers = parts.numbers.flatten(1)
        return cls(
            data=_packed(numbers),
            scales=by_columns(parts.scales.flatten(1)),
            mins=of_rows(parts.mins),
            block_scales=of_rows(parts.block_scales),
            block_mins=of_rows(parts.block_mins),
            high=_packed_high(numbers, high_bits) if high_bits else None,
            high_bits=high_bits,
            zero=parts.zeros,
        )

    @classmethod
    def joined(cls, parts: Sequence[PackedGroups]) -> PackedGroups | None:
        """Returns one matrix with the rows of several matrices, one after the other. Returns None
        if their formats or the orders of their inputs differ."""
        first = parts[0]
        if any(_format_of(part) != _format_of(first) for part in parts):
            return None
        orders = [part.order for part in parts if part.order is not None]
        if any(not torch.equal(order, orders[0]) for order in orders):
            return None
        changed: dict[str, Any] = {}
        for name in (*_OF_ROWS, *_OF_GROUPS):
            if getattr(first, name) is None:
                continue
            tensors = [getattr(part, name) for part in parts]
            if name in _OF_ROWS:
                changed[name] = torch.cat(tensors)
            else:
                columns = torch.cat([_bytes_of(tensor).t() for tensor in tensors], 1)
                changed[name] = columns.view(tensors[0].dtype).t()
        return replace(first, **changed)

    @property
    def shape(self) -> tuple[int, ...]:
        num_out, num_bytes = self.data.shape
        return num_out, num_bytes * (2 if self.data.dtype == torch.uint8 else 1)

    def numbers(self) -> torch.Tensor:
        """Returns the dequantized matrix, float32 [out, in]."""
        if self.data.dtype == torch.uint8:
            blocks = self.data.view(len(self.data), -1, _HALF)
            first, last = blocks & 15, blocks >> 4
            if self.high is not None:
                mask = (1 << self.high_bits) - 1
                shared = 4 // self.high_bits  # blocks
                shifts = torch.arange(0, 8, 8 // shared, dtype=torch.uint8, device=blocks.device)
                high = self.high.view(len(blocks), -1, 1, _HALF) >> shifts.unsqueeze(-1)
                high = high.flatten(1, 2)[:, : blocks.shape[1]]
                first |= (high & mask) << 4
                last |= (high >> self.high_bits & mask) << 4
            numbers = torch.cat((first, last), -1)
            is_e2m1 = self.scales.dtype == torch.float8_e8m0fnu
            wide = e2m1(numbers) if is_e2m1 else numbers.float()
        else:
            wide = self.data.float()
        wide = wide.view(*self.scales.shape, -1)
        if self.zeros is not None:
            wide -= self.zeros.unsqueeze(-1)
        elif self.zero:
            wide -= self.zero
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
        return self._changed(
            lambda part: part[rows],
            lambda part: _bytes_of(part).t().index_select(1, rows).t().view(part.dtype),
        )

    def between(self, first: int, end: int) -> PackedGroups:
        """Returns the rows [first, end) as a view of the same memory."""
        return self._changed(lambda part: part[first:end], lambda part: part[first:end])

    def to(self, device: torch.device) -> PackedGroups:
        order = None if self.order is None else self.order.to(device)
        moved = self._changed(lambda part: part.to(device), lambda part: part.to(device))
        return replace(moved, order=order)

    def _changed(
        self,
        of_rows: Callable[[torch.Tensor], torch.Tensor],
        of_groups: Callable[[torch.Tensor], torch.Tensor],
    ) -> PackedGroups:
        """Returns the matrix after changes of its numbers and of the values of its groups."""
        changes = dict.fromkeys(_OF_ROWS, of_rows) | dict.fromkeys(_OF_GROUPS, of_groups)
        parts = {name: getattr(self, name) for name in changes}
        changed: dict[str, Any] = {
            name: changes[name](part) for name, part in parts.items() if part is not None
        }
        return replace(self, **changed)


def by_columns(of_groups: torch.Tensor) -> torch.Tensor:
    """Returns the same [out, groups] tensor, stored column by column."""
    return _bytes_of(of_groups).t().contiguous().t().view(of_groups.dtype)


def _packed(numbers: torch.Tensor) -> torch.Tensor:
    """Returns `PackedGroups.data` of numbers [out, in]: int8, or uint8 of up to 6 bits. 4-bit
    numbers take a byte each if the inputs do not divide into blocks."""
    if numbers.dtype == torch.int8 or numbers.shape[1] % BLOCK:
        return numbers.contiguous().view(torch.int8)
    first, last = numbers.view(len(numbers), -1, BLOCK).chunk(2, -1)
    return (first & 15 | last << 4).flatten(1).contiguous()


def _packed_high(numbers: torch.Tensor, high_bits: int) -> torch.Tensor:
    """Returns `PackedGroups.high` of numbers [out, in] of 4 + `high_bits` bits."""
    first, last = (numbers >> 4).view(len(numbers), -1, BLOCK).chunk(2, -1)
    pairs = first | last << high_bits  # [out, blocks, 16]
    shared = 4 // high_bits
    pairs = torch.nn.functional.pad(pairs, (0, 0, 0, -pairs.shape[1] % shared))
    high = pairs[:, ::shared].clone()
    for block in range(1, shared):
        high |= pairs[:, block::shared] << (block * 8 // shared)
    return high.flatten(1).contiguous()


def _format_of(groups: PackedGroups) -> list[object]:
    """Returns what two matrices must have in common if their rows may follow one another."""
    each = (getattr(groups, name) for name in (*_OF_ROWS, *_OF_GROUPS))
    forms = [None if part is None else (part.dtype, part.shape[1:]) for part in each]
    return [groups.zero, groups.high_bits, groups.order is None, *forms]


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

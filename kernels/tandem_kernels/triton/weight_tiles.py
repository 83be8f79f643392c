"""The inner loop of products with weights that stay quantized in memory: multiplies a tile of rows
of x with a tile of outputs, INPUTS inputs per iteration.

    weight = (number - zero) * scale + min

A group of consecutive inputs shares a scale, a zero and a min. The weights of a tile are
dequantized in registers, and rounded to the dtype of x as the torch code does. Sums are fp32.

    form       a number                                                    scales
    plain      the weight itself, in the dtype of x                        none
    int8       int8                                                        float, or integers (*)
    int4 to 6  4 to 6 bits, an integer from 0                              float, or integers (*)
    e4m3       e4m3                                                        float
    mxfp4      4 bits: E2M1 (1 bit of sign, 2 of exponent, 1 of mantissa)  E8M0 (a power of 2)

(*) Integers are multiplied by a float16 that all groups of 256 inputs share (GGUF's K-types). So
are the mins, by another float16.

Bytes of 4-bit numbers are in blocks of 32 inputs: byte i of a block has the number of input i in
the low nibble, and of input i + 16 in the high nibble. So the low and the high nibbles of a tile of
bytes are two tiles of weights, and no element has to change its place. The other bits of int5 and
int6 are in bytes of their own, which several blocks share: byte i has those of the inputs i and
i + 16 of the first block in its lowest 2 or 4 bits, then those of the second block.

Values of groups are stored by group: those of consecutive outputs are consecutive in memory. They
are loaded one iteration ahead. Triton fetches only the numbers ahead by itself, because each thread
loads less than 4 bytes of the others.
"""

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

from tandem_kernels.triton.attention_loop import product
from tandem_kernels.triton.kv_rows import read, unit
from tandem_kernels.triton.tuning import is_interpreted

Form = Literal["plain", "int8", "int4", "int5", "int6", "e4m3", "mxfp4"]

_HAVE_NIBBLES = ("int4", "int5", "int6", "mxfp4")
_NIBBLES_BLOCK = 32  # inputs of a block of 4-bit numbers
_GROUP_MIN = 16
_ONE_GROUP = 1 << 30  # size of the only group of a row; a tile has fewer inputs
# 2^14. A number of E2M1 has the bits of a float16 that is smaller by this factor.
_E2M1_UNIT = tl.constexpr(16384.0)
_SMALLEST_E8M0 = tl.constexpr(0x00400000)  # the bits of 2^-127 as fp32


class PackedWeight(NamedTuple):
    """A matrix [out, in], or the matrices of several experts, one after the other."""

    form: Form
    # [out, in]; of 4 to 6 bits: the lowest 4 bits of each number, uint8 [out, in / 2]
    numbers: torch.Tensor
    group_size: int = 0  # inputs that share a scale; 0: all inputs of a row
    # Values of groups: [out, groups] with the strides (1, any).
    scales: torch.Tensor | None = None  # None: the form is plain
    zeros: torch.Tensor | None = None  # uint8; None: `zero`
    mins: torch.Tensor | None = None  # None: 0
    # float16 [out, in / 256], with the strides (1, any): factors of integer scales and mins
    block_scales: torch.Tensor | None = None
    block_mins: torch.Tensor | None = None
    high: torch.Tensor | None = None  # uint8 [out, bytes]: the other bits of int5 and int6
    zero: int = 0

    @property
    def num_in(self) -> int:
        num_bytes = self.numbers.shape[1]
        return 2 * num_bytes if self.form in _HAVE_NIBBLES else num_bytes

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the tensors and strides of the matrix, and its constants, for a kernel."""
        numbers = self.numbers
        scales = numbers if self.scales is None else self.scales
        if self.form == "e4m3" and not _has_e4m3(numbers.device):
            numbers = numbers.view(torch.uint8)
        if self.form == "mxfp4":
            scales = scales.view(torch.uint8)
        of_groups = (self.scales, self.zeros, self.mins, self.block_scales, self.block_mins)
        assert numbers.is_contiguous()
        assert self.high is None or self.high.is_contiguous()
        assert all(part is None or part.stride(0) == 1 for part in of_groups)
        tensors = (
            numbers,
            numbers if self.high is None else self.high,
            scales,
            numbers if self.zeros is None else self.zeros,
            scales if self.mins is None else self.mins,
            scales if self.block_scales is None else self.block_scales,
            scales if self.block_mins is None else self.block_mins,
            0 if self.high is None else self.high.stride(0),
            0 if self.scales is None else self.scales.stride(1),
            0 if self.block_scales is None else self.block_scales.stride(1),
        )
        constants = {
            "FORM": self.form,
            "GROUP": self.group_size or _ONE_GROUP,
            "ZERO": self.zero,
            "HAS_ZEROS": self.zeros is not None,
            "HAS_MINS": self.mins is not None,
            "HAS_BLOCKS": self.block_scales is not None,
        }
        return tensors, constants


def can_multiply(weight: PackedWeight) -> bool:
    """Returns whether the kernels multiply a matrix. Its inputs must divide into blocks if it has
    numbers of less than 8 bits, and its groups must have suitable sizes. The last group of a row
    may be incomplete."""
    size = weight.group_size
    least = _GROUP_MIN
    if weight.form in _HAVE_NIBBLES:
        if weight.num_in % _NIBBLES_BLOCK:
            return False
        # In groups of 16, low and high nibbles have different groups; only scales may differ.
        if weight.zeros is not None or weight.mins is not None or weight.form == "mxfp4":
            least = _NIBBLES_BLOCK
    return size == 0 or (size >= least and size.bit_count() == 1)


def _has_e4m3(device: torch.device) -> bool:
    """Returns whether the device converts numbers of e4m3 by an instruction."""
    return not is_interpreted() and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def multiply(
    sums,
    x_rows,
    is_row,
    weight,
    columns,
    is_column,
    num_in,
    begin,
    end,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_MINS: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Adds the products of rows of x with the weights of outputs, over the inputs from `begin` to
    `end` - 1, to `sums` [ROWS, COLUMNS]. Returns the sums.

    x_rows      [ROWS, 1]: addresses of the rows of x
    weight      the tensors and strides of `PackedWeight.arguments`
    columns     [COLUMNS] int64: rows of the matrix
    begin, end  multiples of INPUTS; end may also be num_in
    """
    numbers, high, stride_high = weight[0], weight[1], weight[7]
    HAS_NIBBLES: tl.constexpr = (
        FORM == "mxfp4" or FORM == "int4" or FORM == "int5" or FORM == "int6"
    )
    HIGH_BITS: tl.constexpr = 2 if FORM == "int6" else 1 if FORM == "int5" else 0
    HIGH_MASK: tl.constexpr = (1 << HIGH_BITS) - 1
    DEPTH: tl.constexpr = INPUTS // 2 if HAS_NIBBLES else INPUTS  # of a tile of numbers
    at = tl.arange(0, DEPTH)
    if FORM != "plain":
        ahead = _load_groups(
            weight,
            columns,
            is_column,
            num_in,
            begin,
            GROUP,
            HAS_NIBBLES,
            HAS_ZEROS,
            HAS_MINS,
            HAS_BLOCKS,
            INPUTS,
        )
    for first in range(begin, end, INPUTS):
        if HAS_NIBBLES:
            inputs = first + at // 16 * 32 + at % 16
            places = first // 2 + at
            width = num_in // 2
        else:
            inputs = first + at
            places = inputs
            width = num_in
        is_input = inputs < num_in
        is_in = is_input[:, None] & is_column[None, :]
        codes = tl.load(numbers + columns[None, :] * width + places[:, None], mask=is_in, other=0.0)
        is_x = is_row[:, None] & is_input[None, :]
        a = tl.load(x_rows + inputs[None, :], mask=is_x, other=0.0)
        if FORM == "plain":
            sums += product(a, codes)
        else:
            scale, upper_scale, zero, least, factor, least_factor = ahead
            ahead = _load_groups(
                weight,
                columns,
                is_column,
                num_in,
                first + INPUTS,
                GROUP,
                HAS_NIBBLES,
                HAS_ZEROS,
                HAS_MINS,
                HAS_BLOCKS,
                INPUTS,
            )
            scale = _repeat(_wide_scales(scale, factor, numbers, FORM, HAS_BLOCKS), DEPTH)
            zero = _repeat(zero.to(tl.float32), DEPTH)
            least = least.to(tl.float32)
            if HAS_BLOCKS:
                least *= least_factor.to(tl.float32)
            least = _repeat(least, DEPTH)
            if HAS_NIBBLES:
                lower_codes = codes & 15
                upper_codes = codes >> 4
                if HIGH_BITS:
                    SHARE: tl.constexpr = 64 // HIGH_BITS  # bytes of numbers for 16 bytes of `high`
                    of_high = places // SHARE * 16 + places % 16
                    shift = (places % SHARE // 16 * (2 * HIGH_BITS)).to(tl.uint8)
                    bits = tl.load(
                        high + columns[None, :] * stride_high + of_high[:, None],
                        mask=is_in,
                        other=0,
                    )
                    bits = bits >> shift[:, None]
                    lower_codes = lower_codes | ((bits & HIGH_MASK) << 4)
                    upper_codes = upper_codes | (((bits >> HIGH_BITS) & HIGH_MASK) << 4)
                upper_scale = _wide_scales(upper_scale, factor, numbers, FORM, HAS_BLOCKS)
                upper_scale = _repeat(upper_scale, DEPTH)
                lower = _weights(lower_codes, scale, zero, least, FORM, ZERO, HAS_ZEROS, HAS_MINS)
                upper = _weights(
                    upper_codes, upper_scale, zero, least, FORM, ZERO, HAS_ZEROS, HAS_MINS
                )
                b = tl.load(x_rows + 16 + inputs[None, :], mask=is_x, other=0.0)
                sums += product(a, lower.to(a.dtype))
                sums += product(b, upper.to(a.dtype))
            else:
                wide = _weights(codes, scale, zero, least, FORM, ZERO, HAS_ZEROS, HAS_MINS)
                sums += product(a, wide.to(a.dtype))
    return sums


@triton.jit
def _load_groups(
    weight,
    columns,
    is_column,
    num_in,
    first,
    GROUP: tl.constexpr,
    HAS_NIBBLES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_MINS: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Loads the values of the groups of the tile that begins at input `first`, each
    [groups, COLUMNS]: scales, scales of high nibbles, zeros, mins, and the factors of scales and of
    mins. Values that a matrix does not have are replaced by the scales."""
    _, _, scales, zeros, mins, block_scales, block_mins, _, stride_groups, stride_blocks = weight
    groups = columns, is_column, stride_groups, num_in, first
    blocks = columns, is_column, stride_blocks, num_in, first
    if HAS_NIBBLES and GROUP == 16:
        scale = _load(scales, groups, GROUP, 2, 0, INPUTS)
        upper_scale = _load(scales, groups, GROUP, 2, 1, INPUTS)
    else:
        scale = _load(scales, groups, GROUP, 1, 0, INPUTS)
        upper_scale = scale
    zero, least, factor, least_factor = scale, scale, scale, scale
    if HAS_ZEROS:
        zero = _load(zeros, groups, GROUP, 1, 0, INPUTS)
    if HAS_MINS:
        least = _load(mins, groups, GROUP, 1, 0, INPUTS)
    if HAS_BLOCKS:
        factor = _load(block_scales, blocks, 256, 1, 0, INPUTS)
        if HAS_MINS:
            least_factor = _load(block_mins, blocks, 256, 1, 0, INPUTS)
    return scale, upper_scale, zero, least, factor, least_factor


@triton.jit
def _load(
    of_groups,
    at,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    START: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Loads the values of the groups of a tile, [groups, COLUMNS]: of each STEP groups, the one
    with the number START."""
    columns, is_column, stride, num_in, first = at
    COUNT: tl.constexpr = INPUTS // (GROUP * STEP) if GROUP < INPUTS else 1
    groups = first // GROUP + START + tl.arange(0, COUNT) * STEP
    places = of_groups + columns[None, :] + groups[:, None] * stride
    is_in = is_column[None, :] & (groups * GROUP < num_in)[:, None]
    return tl.load(places, mask=is_in, other=0.0)


@triton.jit
def _wide_scales(scale, factor, numbers, FORM: tl.constexpr, HAS_BLOCKS: tl.constexpr):
    """Returns scales in fp32. Where `_weights` begins with numbers that are too small by a factor,
    the scales include this factor."""
    if FORM == "mxfp4":
        wide = _power_of_2(scale) * _E2M1_UNIT
    elif FORM == "e4m3":
        wide = scale.to(tl.float32) * unit(numbers.dtype)
    else:
        wide = scale.to(tl.float32)
    if HAS_BLOCKS:
        wide *= factor.to(tl.float32)
    return wide


@triton.jit
def _weights(
    codes,
    scale,
    zero,
    least,
    FORM: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_MINS: tl.constexpr,
):
    """Returns the fp32 weights of a tile of numbers."""
    if FORM == "mxfp4":
        bits = codes.to(tl.uint16)
        halves = ((bits & 7) << 9) | ((bits & 8) << 12)
        number = halves.to(tl.float16, bitcast=True).to(tl.float32)
    elif FORM == "e4m3":
        number = read(codes, tl.float32)
    else:
        number = codes.to(tl.float32)
    if HAS_ZEROS:
        number -= zero
    elif ZERO:
        number -= ZERO
    weight = number * scale
    if HAS_MINS:
        weight += least
    return weight


@triton.jit
def _repeat(of_groups, DEPTH: tl.constexpr):
    """Repeats the values of a tile's groups for each of its DEPTH rows of numbers. A single group
    stays [1, COLUMNS]."""
    COUNT: tl.constexpr = of_groups.shape[0]
    COLUMNS: tl.constexpr = of_groups.shape[1]
    repeated = of_groups
    if COUNT > 1:
        of_inputs = tl.broadcast_to(of_groups[:, None, :], (COUNT, DEPTH // COUNT, COLUMNS))
        repeated = of_inputs.reshape(DEPTH, COLUMNS)
    return repeated


@triton.jit
def _power_of_2(exponents):
    """Converts scales of E8M0 to fp32: 2^(exponent - 127)."""
    bits = exponents.to(tl.int32) << 23
    return tl.where(bits == 0, _SMALLEST_E8M0, bits).to(tl.float32, bitcast=True)

"""Reads blocks of GGUF's types with torch, on any device.

    weight = scale * (number - zero) + min

A block is a run of weights, for example 32, that share scales. Its bytes hold the scales and the
quantized numbers. `split` returns these parts, and `widen` the weights. The block types are defined
in https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.

Weights equal those of native/blocks.cpp bit by bit. No data is copied from the host, so CUDA graphs
can record these functions.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

Q4_Z32, Q4_Z64 = 1032, 1064  # two block types that Tandem adds to GGUF's (native/blocks.h)

# 2^14. A number of E2M1 has the bits of a float16 that is smaller by this factor.
_E2M1_UNIT = 16384.0


class Parts(NamedTuple):
    """The parts of blocks, [..., bytes of a block]. A block has n numbers in equal groups."""

    numbers: torch.Tensor  # [..., n]: uint8 or int8; uint8 E2M1 codes if the scales are E8M0
    scales: torch.Tensor  # [..., groups]: float16, float8_e8m0fnu, or integers with `block_scales`
    mins: torch.Tensor | None = None  # [..., groups], like the scales; None: 0
    zeros: int | torch.Tensor = 0  # a number, or [..., groups] uint8
    # float16 [..., 1]: the scales and the mins are multiplied by these. None: by 1.
    block_scales: torch.Tensor | None = None
    block_mins: torch.Tensor | None = None


class BlockType(NamedTuple):
    num_bytes: int
    split: Callable[[torch.Tensor], Parts]  # [..., bytes] -> parts


def split(data: torch.Tensor, block_type: int) -> Parts:
    """Returns the parts of rows of blocks, uint8 [rows, bytes]: of each, [rows, blocks, ...]."""
    kind = TYPES[block_type]
    return kind.split(data.view(len(data), -1, kind.num_bytes))


def widen(data: torch.Tensor, block_type: int) -> torch.Tensor:
    """Dequantizes rows of blocks, uint8 [rows, bytes], to float32 [rows, numbers]."""
    parts = split(data, block_type)
    scales = parts.scales.float()
    if parts.block_scales is not None:
        scales = parts.block_scales.float() * scales
    is_e2m1 = parts.scales.dtype == torch.float8_e8m0fnu
    numbers = e2m1(parts.numbers) if is_e2m1 else parts.numbers.float()
    wide = numbers.view(*scales.shape, -1)
    if isinstance(parts.zeros, torch.Tensor):
        wide -= parts.zeros.unsqueeze(-1)
    elif parts.zeros:
        wide -= parts.zeros
    wide *= scales.unsqueeze(-1)
    if parts.mins is not None:
        mins = parts.mins.float()
        if parts.block_mins is not None:
            mins = parts.block_mins.float() * mins
        wide += mins.unsqueeze(-1)
    return wide.flatten(1)


def e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Returns the numbers of E2M1 codes (1 bit of sign, 2 of exponent, 1 of mantissa), float32.
    `codes` has one code per byte."""
    wide = codes.short()
    return ((wide & 7) << 9 | (wide & 8) << 12).view(torch.float16).float() * _E2M1_UNIT


def _half(two_bytes: torch.Tensor) -> torch.Tensor:
    return two_bytes.contiguous().view(torch.float16)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Unpacks 4-bit numbers: [..., n] bytes become [..., 2 n] numbers, first the low nibbles of all
    bytes, then the high nibbles."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Expands four bytes to 32 numbers, one per bit: 16 if the bit is set, otherwise 0. This is the
    fifth bit of a 5-bit number."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(-2) << 4


def _q4_0(block: torch.Tensor) -> Parts:
    return Parts(_nibbles(block[..., 2:]), _half(block[..., :2]), zeros=8)


def _q4_1(block: torch.Tensor) -> Parts:
    return Parts(_nibbles(block[..., 4:]), _half(block[..., :2]), _half(block[..., 2:4]))


def _q5_0(block: torch.Tensor) -> Parts:
    numbers = _nibbles(block[..., 6:]) | _fifth_bits(block[..., 2:6])
    return Parts(numbers, _half(block[..., :2]), zeros=16)


def _q5_1(block: torch.Tensor) -> Parts:
    numbers = _nibbles(block[..., 8:]) | _fifth_bits(block[..., 4:8])
    return Parts(numbers, _half(block[..., :2]), _half(block[..., 2:4]))


def _q8_0(block: torch.Tensor) -> Parts:
    return Parts(block[..., 2:].view(torch.int8), _half(block[..., :2]))


def _zeroed(block: torch.Tensor) -> Parts:
    """Splits Q4_Z32 and Q4_Z64 blocks, in which 32 or 64 numbers share a scale and a zero point of
    one byte."""
    groups = block[..., 3:].reshape(*block.shape[:-1], -1, 16)
    return Parts(_nibbles(groups).flatten(-2), _half(block[..., :2]), zeros=block[..., 2:3])


def _mxfp4(block: torch.Tensor) -> Parts:
    return Parts(_nibbles(block[..., 1:]), block[..., :1].view(torch.float8_e8m0fnu))


def _scales_and_mins(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the scales and the minimums of the eight groups of a Q4_K or Q5_K block, uint8
    [..., 8]. A block stores these 16 numbers in 12 bytes, with 6 bits each."""
    packed = block[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    mins = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
    return scales, mins


def _with_groups_of_32(block: torch.Tensor, numbers: torch.Tensor) -> Parts:
    """Returns the parts of a Q4_K or Q5_K block. `numbers` is [..., 8, 32]."""
    scales, mins = _scales_and_mins(block)
    of_block = _half(block[..., :2]), -_half(block[..., 2:4])
    return Parts(numbers.flatten(-2), scales, mins, 0, *of_block)


def _pairs_of_groups(packed: torch.Tensor) -> torch.Tensor:
    """Unpacks 128 bytes to eight groups of 32 numbers, [..., 8, 32]. The first 32 bytes have group
    0 in the low nibbles and group 1 in the high nibbles, the next 32 bytes groups 2 and 3, and so
    on."""
    bytes_of_pairs = packed.reshape(*packed.shape[:-1], 4, 1, 32)
    return torch.cat((bytes_of_pairs & 15, bytes_of_pairs >> 4), -2).flatten(-3, -2)


def _q4_k(block: torch.Tensor) -> Parts:
    return _with_groups_of_32(block, _pairs_of_groups(block[..., 16:]))


def _q5_k(block: torch.Tensor) -> Parts:
    groups = torch.arange(8, dtype=torch.uint8, device=block.device).unsqueeze(-1)
    high = ((block[..., None, 16:48] >> groups) & 1) << 4
    return _with_groups_of_32(block, _pairs_of_groups(block[..., 48:]) | high)


def _q6_k(block: torch.Tensor) -> Parts:
    before = block.shape[:-1]
    low = block[..., :128].reshape(*before, 2, 1, 2, 32)
    # The shape becomes [..., 2, 2, 2, 32], in which [..., i, j, k, :] is group 4 i + 2 j + k.
    low = torch.cat((low & 15, low >> 4), -3)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=block.device).unsqueeze(-1)
    high = (block[..., 128:192].reshape(*before, 2, 1, 32) >> shifts & 3) << 4
    numbers = (low.flatten(-3, -2) | high).reshape(*before, 256)
    scales = block[..., 192:208].view(torch.int8)
    return Parts(numbers, scales, zeros=32, block_scales=_half(block[..., 208:]))


TYPES = {  # by the type's number in GGUF; the last two types do not exist in GGUF
    2: BlockType(18, _q4_0),
    3: BlockType(20, _q4_1),
    6: BlockType(22, _q5_0),
    7: BlockType(24, _q5_1),
    8: BlockType(34, _q8_0),
    12: BlockType(144, _q4_k),
    13: BlockType(176, _q5_k),
    14: BlockType(210, _q6_k),
    39: BlockType(17, _mxfp4),
    Q4_Z32: BlockType(19, _zeroed),
    Q4_Z64: BlockType(35, _zeroed),
}

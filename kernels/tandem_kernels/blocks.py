"""Dequantizes blocks of GGUF's types with torch, on any device.

    weight = scale * (number - zero) + min

A block is a run of weights, for example 32, that share scales. Its bytes hold the scales and the
quantized numbers. The block types are defined in
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.

Results equal those of native/blocks.cpp bit by bit. No data is copied from the host, so CUDA graphs
can record these functions.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

Q4_Z32, Q4_Z64 = 1032, 1064  # two block types that Tandem adds to GGUF's (native/blocks.h)


class BlockType(NamedTuple):
    num_bytes: int
    widen: Callable[[torch.Tensor], torch.Tensor]  # [..., bytes] -> float32 [..., numbers]


def widen(data: torch.Tensor, block_type: int) -> torch.Tensor:
    """Dequantizes rows of blocks, uint8 [rows, bytes], to float32 [rows, numbers]."""
    kind = TYPES[block_type]
    return kind.widen(data.view(len(data), -1, kind.num_bytes)).flatten(1)


def _half(two_bytes: torch.Tensor) -> torch.Tensor:
    return two_bytes.contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Unpacks 4-bit numbers: [..., n] bytes become [..., 2 n] numbers, first the low nibbles of all
    bytes, then the high nibbles."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Expands four bytes to 32 numbers, one per bit: 16 if the bit is set, otherwise 0. This is the
    fifth bit of a 5-bit number."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(-2) << 4


def _q4_0(block: torch.Tensor) -> torch.Tensor:
    return (_nibbles(block[..., 2:]).float() - 8) * _half(block[..., :2])


def _q4_1(block: torch.Tensor) -> torch.Tensor:
    return _nibbles(block[..., 4:]).float() * _half(block[..., :2]) + _half(block[..., 2:4])


def _q5_0(block: torch.Tensor) -> torch.Tensor:
    numbers = _nibbles(block[..., 6:]) | _fifth_bits(block[..., 2:6])
    return (numbers.float() - 16) * _half(block[..., :2])


def _q5_1(block: torch.Tensor) -> torch.Tensor:
    numbers = _nibbles(block[..., 8:]) | _fifth_bits(block[..., 4:8])
    return numbers.float() * _half(block[..., :2]) + _half(block[..., 2:4])


def _q8_0(block: torch.Tensor) -> torch.Tensor:
    return block[..., 2:].view(torch.int8).float() * _half(block[..., :2])


def _zeroed(block: torch.Tensor) -> torch.Tensor:
    """Dequantizes Q4_Z32 and Q4_Z64 blocks, in which 32 or 64 numbers share a scale and a zero
    point of one byte."""
    groups = block[..., 3:].reshape(*block.shape[:-1], -1, 16)
    numbers = _nibbles(groups).flatten(-2)
    return (numbers.float() - block[..., 2:3].float()) * _half(block[..., :2])


def _mxfp4(block: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(block[..., 1:]).int()
    size = codes & 7
    # Twice the magnitude of a number. The first formula is for normal numbers, the second for
    # subnormal ones.
    doubled = (2 | size & 1) << (size // 2 - 1).clamp(min=0)
    doubled = torch.where(size < 2, size, doubled)
    exponents = block[..., :1].int() - 128
    return torch.ldexp(torch.where(codes < 8, doubled, -doubled).float(), exponents)


def _scales_and_mins(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the scales and the minimums of the eight groups of a Q4_K or Q5_K block, each
    [..., 8, 1]. A block stores these 16 numbers in 12 bytes, with 6 bits each."""
    packed = block[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    mins = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
    scale, low = _half(block[..., :2]), _half(block[..., 2:4])
    return (scale * scales).unsqueeze(-1), -(low * mins).unsqueeze(-1)


def _pairs_of_groups(packed: torch.Tensor) -> torch.Tensor:
    """Unpacks 128 bytes to eight groups of 32 numbers, [..., 8, 32]. The first 32 bytes have group
    0 in the low nibbles and group 1 in the high nibbles, the next 32 bytes groups 2 and 3, and so
    on."""
    bytes_of_pairs = packed.reshape(*packed.shape[:-1], 4, 1, 32)
    return torch.cat((bytes_of_pairs & 15, bytes_of_pairs >> 4), -2).flatten(-3, -2)


def _q4_k(block: torch.Tensor) -> torch.Tensor:
    scales, mins = _scales_and_mins(block)
    return (_pairs_of_groups(block[..., 16:]).float() * scales + mins).flatten(-2)


def _q5_k(block: torch.Tensor) -> torch.Tensor:
    scales, mins = _scales_and_mins(block)
    groups = torch.arange(8, dtype=torch.uint8, device=block.device).unsqueeze(-1)
    high = ((block[..., None, 16:48] >> groups) & 1) << 4
    return ((_pairs_of_groups(block[..., 48:]) | high).float() * scales + mins).flatten(-2)


def _q6_k(block: torch.Tensor) -> torch.Tensor:
    before = block.shape[:-1]
    low = block[..., :128].reshape(*before, 2, 1, 2, 32)
    # The shape becomes [..., 2, 2, 2, 32], in which [..., i, j, k, :] is group 4 i + 2 j + k.
    low = torch.cat((low & 15, low >> 4), -3)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=block.device).unsqueeze(-1)
    high = (block[..., 128:192].reshape(*before, 2, 1, 32) >> shifts & 3) << 4
    numbers = (low.flatten(-3, -2) | high).reshape(*before, 16, 16)
    scales = _half(block[..., 208:]) * block[..., 192:208].view(torch.int8)
    return ((numbers.float() - 32) * scales.unsqueeze(-1)).flatten(-2)


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

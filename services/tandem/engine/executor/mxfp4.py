"""MXFP4: blocks of 32 numbers of 4 bits with one scale, a power of 2.

    blocks    [..., blocks, 16] uint8: the lower half of a byte comes before the upper
    scales    [..., blocks] uint8: 127 + the exponent of 2
    a number  1 bit of sign, 2 of exponent, 1 of mantissa (E2M1)

OCP Microscaling Formats (MX) Specification 1.0.
"""

import torch

BLOCK = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


def dequantize(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the numbers [..., 32 * blocks]; bfloat16 holds each of them exactly."""
    numbers = torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)], dtype=dtype)
    out = torch.empty((*blocks.shape[:-1], BLOCK), dtype=dtype)
    out[..., 0::2] = numbers[(blocks & 15).long()]
    out[..., 1::2] = numbers[(blocks >> 4).long()]
    exponents = (scales.int() - _BIAS).unsqueeze(-1)
    return torch.ldexp(out, exponents).to(dtype).flatten(-2)

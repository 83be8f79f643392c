"""The arithmetic of an fp8_e4m3 KV pool: each token's K, and V, of a head is quantized by itself.

    m        largest |x| of the row's D numbers, fp32
    scale    m / 448 in fp32, at most 65504, then rounded up to float16 (so |x / scale| <= 448)
    number   x / scale in fp32, within -448 to 448, rounded to the nearest e4m3 (ties to even)
    x        is read as number * scale, which is exact in fp32

An e4m3 is a byte: a sign, 4 bits of an exponent and 3 of a fraction, as float8_e4m3fn has them. Its
largest number is 448, and numbers below 2^-6 are multiples of 2^-9. With the 7 lower bits moved up
by 7 it is a float16 that is 256 times less, which is how kernels read it.

Rows of zeros and rows with a number that is not finite are as in kv_int8.py, and here, too, a
token's bytes depend on its own row alone. `quantize` in native/kv_fp8.h computes the same bytes.
"""

import torch

from tandem_kernels.kv_int8 import scales_of

LARGEST = 448


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., D] of any float dtype to the bytes of e4m3 [..., D] and float16 scales [...]."""
    wide = rows.float()
    scales, divisors = scales_of(wide, LARGEST)
    numbers = (wide / divisors.unsqueeze(-1)).clamp_(-LARGEST, LARGEST)
    numbers = torch.where(divisors.unsqueeze(-1).isinf(), 0.0, numbers)
    return numbers.to(torch.float8_e4m3fn).view(torch.uint8), scales


def widen(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns the fp32 rows [..., D] that bytes and their scales stand for."""
    return numbers.view(torch.float8_e4m3fn).float() * scales.float().unsqueeze(-1)

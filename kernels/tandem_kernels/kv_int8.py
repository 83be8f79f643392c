"""The arithmetic of an int8 KV pool: each token's K, and V, of a head is quantized by itself.

    m        largest |x| of the row's D numbers, fp32
    scale    m / 127 in fp32, at most 65504, then rounded up to float16 (so |x / scale| <= 127)
    number   x / scale in fp32, rounded to the nearest integer (ties to even), within -127 to 127
    x        is read as number * scale, which is exact in fp32

A row of zeros has the scale 0 and zeros. A row with a number that is not finite has the scale NaN
and zeros, so that whatever attends to it is NaN, as with a pool of floats. A token's bytes depend
on its own row alone. `quantize` in native/kv_int8.h computes the same bytes.
"""

import torch

_LARGEST = 127
SCALE_MAX = 65504.0  # float16's largest number


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., D] of any float dtype to int8 numbers [..., D] and float16 scales [...]."""
    wide = rows.float()
    scales, divisors = scales_of(wide, _LARGEST)
    numbers = (wide / divisors.unsqueeze(-1)).round_().clamp_(-_LARGEST, _LARGEST)
    return torch.where(divisors.unsqueeze(-1).isinf(), 0.0, numbers).to(torch.int8), scales


def scales_of(wide: torch.Tensor, highest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the float16 scales [...] of fp32 rows [..., D] whose numbers reach to `highest`, and
    what to divide by: infinity where the numbers are to be zeros."""
    largest = wide.abs().amax(-1)
    is_finite = largest.isfinite()
    # By a tensor: by a plain number CUDA multiplies with a reciprocal, which is another rounding.
    wanted = largest / torch.full_like(largest, highest)
    scales = round_up(torch.where(is_finite, wanted, 0.0))
    divisors = torch.where(is_finite & (scales > 0), scales.float(), torch.inf)
    return torch.where(is_finite, scales, torch.nan), divisors


def round_up(wanted: torch.Tensor) -> torch.Tensor:
    """Returns the float16 numbers that are not below fp32 ones from 0 on, at most 65504."""
    wanted = wanted.clamp(max=SCALE_MAX)
    nearest = wanted.half()
    # Bits of the next larger number are one more.
    bits = nearest.view(torch.int16) + (nearest.float() < wanted)
    return bits.to(torch.int16).view(torch.float16)


def widen(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns the fp32 rows [..., D] that int8 numbers and their scales stand for."""
    return numbers.float() * scales.float().unsqueeze(-1)

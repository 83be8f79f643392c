"""4-bit quantization for a KV pool. A row, the K or V of one token and head, has its own scale.

    e        the number with the largest |x| in the row of D numbers, fp32; the negative one if both
             e and -e occur
    scale    -e / 8 in fp32, at most 65504, its magnitude rounded up to float16
    number   x / scale in fp32, rounded to the nearest integer (ties to even), within -8 to 7
    x        is dequantized as number * scale, which is exact in fp32

The number for e is -8 for both signs of e, so all 16 codes are used. Byte i of a row holds
number i + 8 in its low nibble and number (i + D / 2) + 8 in its high nibble; D is even.

Rows of zeros and rows with infinities or NaN are treated as in kv_int8.py. A row's bytes depend
on that row only. `quantize` in native/kv_int4.h computes the same bytes.
"""

import torch

from tandem_kernels.kv_int8 import round_up

_LOWEST, _HIGHEST = -8, 7


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes rows [..., D] of any float dtype to bytes [..., D / 2], each with two numbers, and
    float16 scales [...]."""
    wide = rows.float()
    scales, divisors = scales_of(wide)
    numbers = (wide / divisors.unsqueeze(-1)).round_().clamp_(_LOWEST, _HIGHEST)
    numbers = torch.where(scales.isnan().unsqueeze(-1), 0.0, numbers)
    low, high = (numbers - _LOWEST).to(torch.uint8).chunk(2, -1)
    return low | high << 4, scales


def scales_of(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the float16 scales [...] of fp32 rows [..., D], and the fp32 divisors [...]. A
    divisor is infinite if all numbers of its row become 0."""
    largest = wide.abs().amax(-1)
    is_finite = largest.isfinite()
    scales = round_up(torch.where(is_finite, largest / -_LOWEST, 0.0))
    scales = torch.where(wide.amin(-1) == -largest, scales, -scales)
    divisors = torch.where(is_finite & (scales != 0), scales.float(), torch.inf)
    return torch.where(is_finite, scales, torch.nan), divisors


def widen(pairs: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantizes bytes [..., D / 2], each with two numbers, and scales [...] to fp32 rows [...,
    D]."""
    numbers = torch.cat((pairs & 15, pairs >> 4), -1).float() + _LOWEST
    return numbers * scales.float().unsqueeze(-1)

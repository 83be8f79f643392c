"""4-bit quantization for a KV pool. A row has D elements x, the K or V of one token and head. Each
row has its own scale.

    e        the element with the largest |x|, fp32; the negative one if both e and -e occur
    scale    -e / 8 in fp32, its magnitude at most 65504 and rounded up to float16
    number   x / scale in fp32, rounded to the nearest integer (ties to even), within -8 to 7
    x        is dequantized as number * scale, which is exact in fp32

The scale may be negative. So the number for e is always -8, and all 16 numbers from -8 to 7 are
used. For example, e = 4 gives the scale -0.5.

A row is stored in D / 2 bytes, where D is even. The low nibble of byte i is number[i] + 8, and the
high nibble is number[i + D / 2] + 8.

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
    """Returns the float16 scales [...] of fp32 rows [..., D], and the fp32 divisors [...] by which
    the rows are divided. The divisor is the scale, or infinity if all numbers must become 0."""
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

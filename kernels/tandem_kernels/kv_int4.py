"""The arithmetic of 4-bit rows of a KV pool: each token's K, or V, of a head by itself.

    e        the number with the largest |x| of the row's D numbers, fp32; of e and -e the negative
    scale    -e / 8 in fp32, at most 65504, its magnitude rounded up to float16
    number   x / scale in fp32, rounded to the nearest integer (ties to even), within -8 to 7
    x        is read as number * scale, which is exact in fp32

So e is -8, whatever its sign, and all 16 numbers are of use. Byte i of a row holds number i plus 8
in its lower half and number i + D / 2 plus 8 in its upper half; D is even.

Rows of zeros and rows with a number that is not finite are as in kv_int8.py, and here, too, a
token's bytes depend on its own row alone. `quantize` in native/kv_int4.h computes the same bytes.
"""

import torch

from tandem_kernels.kv_int8 import round_up

_LOWEST, _HIGHEST = -8, 7


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., D] of any float dtype to uint8 pairs [..., D / 2] and float16 scales [...]."""
    wide = rows.float()
    scales, divisors = scales_of(wide)
    numbers = (wide / divisors.unsqueeze(-1)).round_().clamp_(_LOWEST, _HIGHEST)
    numbers = torch.where(scales.isnan().unsqueeze(-1), 0.0, numbers)
    low, high = (numbers - _LOWEST).to(torch.uint8).chunk(2, -1)
    return low | high << 4, scales


def scales_of(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the float16 scales [...] of fp32 rows [..., D], and what to divide by: infinity where
    the numbers are to be zeros."""
    largest = wide.abs().amax(-1)
    is_finite = largest.isfinite()
    scales = round_up(torch.where(is_finite, largest / -_LOWEST, 0.0))
    scales = torch.where(wide.amin(-1) == -largest, scales, -scales)
    divisors = torch.where(is_finite & (scales != 0), scales.float(), torch.inf)
    return torch.where(is_finite, scales, torch.nan), divisors


def widen(pairs: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns the fp32 rows [..., D] that pairs of numbers and their scales stand for."""
    numbers = torch.cat((pairs & 15, pairs >> 4), -1).float() + _LOWEST
    return numbers * scales.float().unsqueeze(-1)

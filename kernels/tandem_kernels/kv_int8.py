"""Quantization for an int8 KV pool. A row, the K or V of one token and head, has its own scale.

    m        largest |x| in the row of D numbers, fp32
    scale    m / 127 in fp32, at most 65504, then rounded up to float16 (so |x / scale| <= 127)
    number   x / scale in fp32, rounded to the nearest integer (ties to even), within -127 to 127
    x        is dequantized as number * scale, which is exact in fp32

A row of zeros has scale 0. A row with infinities or NaN has scale NaN and zeros as numbers, so
its attention output is NaN, as with an unquantized pool. A row's bytes depend on that row only.
`quantize` in native/kv_int8.h computes the same bytes.
"""

import torch

_LARGEST = 127
SCALE_MAX = 65504.0  # float16's largest number


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes rows [..., D] of any float dtype to int8 numbers [..., D] and float16 scales
    [...]."""
    wide = rows.float()
    scales, divisors = scales_of(wide, _LARGEST)
    numbers = (wide / divisors.unsqueeze(-1)).round_().clamp_(-_LARGEST, _LARGEST)
    return torch.where(divisors.unsqueeze(-1).isinf(), 0.0, numbers).to(torch.int8), scales


def scales_of(wide: torch.Tensor, highest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the float16 scales [...] of fp32 rows [..., D] whose numbers may be up to `highest`,
    and the fp32 divisors [...] by which the rows are divided. The divisor is the scale, or infinity
    if all numbers must become 0."""
    largest = wide.abs().amax(-1)
    is_finite = largest.isfinite()
    # CUDA divides by a tensor exactly. To divide by a Python number, it multiplies by the
    # reciprocal, which rounds differently.
    wanted = largest / torch.full_like(largest, highest)
    scales = round_up(torch.where(is_finite, wanted, 0.0))
    divisors = torch.where(is_finite & (scales > 0), scales.float(), torch.inf)
    return torch.where(is_finite, scales, torch.nan), divisors


def round_up(wanted: torch.Tensor) -> torch.Tensor:
    """Rounds non-negative fp32 numbers up to float16. Larger numbers than 65504 become 65504."""
    wanted = wanted.clamp(max=SCALE_MAX)
    nearest = wanted.half()
    # Adding 1 to the bits of a float16, read as an integer, gives the next larger float16.
    bits = nearest.view(torch.int16) + (nearest.float() < wanted)
    return bits.to(torch.int16).view(torch.float16)


def widen(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantizes int8 numbers [..., D] with scales [...] to fp32 rows [..., D]."""
    return numbers.float() * scales.float().unsqueeze(-1)

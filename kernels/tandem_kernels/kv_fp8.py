"""Quantization for an fp8_e4m3 KV pool. A row, the K or V of one token and head, has its own scale.

    m        largest |x| in the row of D numbers, fp32
    scale    m / 448 in fp32, at most 65504, then rounded up to float16 (so |x / scale| <= 448)
    number   x / scale in fp32, within -448 to 448, rounded to the nearest e4m3 (ties to even)
    x        is dequantized as number * scale, which is exact in fp32

An e4m3 number is a byte with a sign, 4 exponent bits and 3 fraction bits, as in float8_e4m3fn. The
largest number is 448, and numbers below 2^-6 are multiples of 2^-9. Kernels decode e4m3 by a shift:
the lower 7 bits of the byte, shifted left by 7, are a float16 with 1/256 of the value.

A checkpoint may have static scales, one for the K and one for the V of each layer. They are rounded
up to float16 and used instead of a scale per row. Elements beyond 448 times a static scale become
448 times the scale.

Rows of zeros and rows with infinities or NaN are treated as in kv_int8.py. A row's bytes depend on
that row only. `quantize` in native/kv_fp8.h computes the same bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from tandem_kernels.kv_int8 import scales_of

_LARGEST = 448


@dataclass(frozen=True)
class FixedScales:
    """The static scales of a checkpoint for K and V, which all tokens share."""

    scales: torch.Tensor  # [layers, 2] float16: scale of K, scale of V

    @property
    def digest(self) -> str:
        """Hash of the scales, 8 hex digits. Blocks can be exchanged only between pools with equal
        digests."""
        data = self.scales.cpu().contiguous().numpy().tobytes()
        return hashlib.blake2b(data, digest_size=4).hexdigest()

    def of_layers(self, layers: list[int], device: torch.device) -> FixedScales:
        """Returns the scales of the given layers, in that order, on a device."""
        return FixedScales(self.scales[layers].contiguous().to(device))


def quantize(
    rows: torch.Tensor, fixed: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes rows [..., D] of any float dtype to e4m3 bytes [..., D] and float16 scales [...].

    fixed  a scalar float16: the static scale of all rows; None: each row has its own scale
    """
    wide = rows.float()
    scales, divisors = scales_of(wide, _LARGEST)
    if fixed is not None:
        is_finite = ~scales.isnan()
        scales = torch.where(is_finite, fixed, scales)
        divisors = torch.where(is_finite, fixed.float(), torch.inf)
    numbers = (wide / divisors.unsqueeze(-1)).clamp_(-_LARGEST, _LARGEST)
    numbers = torch.where(divisors.unsqueeze(-1).isinf(), 0.0, numbers)
    return numbers.to(torch.float8_e4m3fn).view(torch.uint8), scales


def widen(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantizes e4m3 bytes [..., D] with scales [...] to fp32 rows [..., D]."""
    return numbers.view(torch.float8_e4m3fn).float() * scales.float().unsqueeze(-1)

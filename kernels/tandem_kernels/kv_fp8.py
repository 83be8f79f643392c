"""The arithmetic of an fp8_e4m3 KV pool: each token's K, and V, of a head is quantized by itself.

    m        largest |x| of the row's D numbers, fp32
    scale    m / 448 in fp32, at most 65504, then rounded up to float16 (so |x / scale| <= 448)
    number   x / scale in fp32, within -448 to 448, rounded to the nearest e4m3 (ties to even)
    x        is read as number * scale, which is exact in fp32

An e4m3 is a byte: a sign, 4 bits of an exponent and 3 of a fraction, as float8_e4m3fn has them. Its
largest number is 448, and numbers below 2^-6 are multiples of 2^-9. With the 7 lower bits moved up
by 7 it is a float16 that is 256 times less, which is how kernels read it.

A checkpoint may give a static scale of K, and one of V, for each layer. It is rounded up to float16
and takes the place of the row's own; larger numbers become 448 times the scale.

Rows of zeros and rows with a number that is not finite are as in kv_int8.py, and here, too, a
token's bytes depend on its own row alone. `quantize` in native/kv_fp8.h computes the same bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from tandem_kernels.kv_int8 import scales_of

_LARGEST = 448


@dataclass(frozen=True)
class FixedScales:
    """The static scales of a checkpoint."""

    scales: torch.Tensor  # [layers, 2] float16: of K and of V

    @property
    def digest(self) -> str:
        """Tells these scales from others."""
        data = self.scales.cpu().contiguous().numpy().tobytes()
        return hashlib.blake2b(data, digest_size=4).hexdigest()

    def of_layers(self, layers: list[int], device: torch.device) -> FixedScales:
        """Returns those of some layers, in their order."""
        return FixedScales(self.scales[layers].contiguous().to(device))


def quantize(
    rows: torch.Tensor, fixed: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., D] of any float dtype to the bytes of e4m3 [..., D] and float16 scales [...].

    fixed  [] float16: the scale of all rows, instead of their own
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
    """Returns the fp32 rows [..., D] that bytes and their scales stand for."""
    return numbers.view(torch.float8_e4m3fn).float() * scales.float().unsqueeze(-1)

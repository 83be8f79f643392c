"""Reads weights in the format MXFP4, in which 32 numbers of 4 bits form a block and share a scale.
The scale is a power of 2. A number has 1 bit of sign, 2 of exponent and 1 of mantissa (E2M1).

A safetensors file stores the matrix NAME as two tensors:

    tensor         shape and type                    content
    NAME_blocks    [experts, out, blocks, 16] uint8  two numbers per byte, the first in the low half
    NAME_scales    [experts, out, blocks] uint8      127 + the exponent of the scale

In a GGUF file, a block is one byte with the scale and then 16 bytes with the numbers. The low
halves of the 16 bytes are numbers 0 to 15, and the high halves are numbers 16 to 31.

Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import gguf
import torch

from tandem.models.checkpoint.expert_names import MXFP4_BLOCK
from tandem.models.gguf.tensors import GgufBlocks

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """The matrices of all experts of a layer in MXFP4, in the layout of safetensors files."""

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        num, num_out, num_blocks, _ = self.codes.shape
        return num, num_out, num_blocks * MXFP4_BLOCK

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The tensors as the checkpoint stores them: codes and scales."""
        return self.codes, self.scales

    def numbers(self) -> torch.Tensor:
        """Returns the matrices in bfloat16, [experts, out, in]. Dequantizing loses no bits."""
        numbers = torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)])
        out = torch.empty((*self.codes.shape[:-1], MXFP4_BLOCK), dtype=torch.bfloat16)
        for expert, codes, scales in zip(out, self.codes, self.scales, strict=True):
            exponents = (scales.int() - _BIAS).unsqueeze(-1)
            expert.copy_(torch.ldexp(numbers[_one_by_one(codes).long()], exponents))
        return out.flatten(-2)

    def blocks(self) -> GgufBlocks:
        """Returns the same matrices in the layout of GGUF files."""
        num, num_out, num_in = self.shape
        data = torch.empty((*self.codes.shape[:-1], 1 + MXFP4_BLOCK // 2), dtype=torch.uint8)
        for expert, codes, scales in zip(data, self.codes, self.scales, strict=True):
            first, last = _one_by_one(codes).chunk(2, dim=-1)
            expert[..., 0] = scales
            expert[..., 1:] = first | last << 4
        kind = gguf.GGMLQuantizationType.MXFP4
        return GgufBlocks(data.view(num * num_out, -1), kind, (num, num_out, num_in))


def join_mxfp4(stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | Mxfp4]:
    """Returns the tensors of a checkpoint by name. The two tensors NAME_blocks and NAME_scales
    become one `Mxfp4` with the name NAME."""
    joined: dict[str, torch.Tensor | Mxfp4] = dict(stored)
    for stem in [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]:
        del joined[f"{stem}_blocks"], joined[f"{stem}_scales"]
        joined[stem] = Mxfp4(stored[f"{stem}_blocks"], stored[f"{stem}_scales"])
    return joined


def _one_by_one(codes: torch.Tensor) -> torch.Tensor:
    """Unpacks the 4-bit codes of each block, [..., 16] bytes, to [..., 32] elements."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)

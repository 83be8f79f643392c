"""Integers in groups of inputs with a scale, and the same as blocks of GGUF's types.

    weight = (number - zero) * scale

The blocks have groups of 32 inputs and scales of float16. Where no zero is another than 8 they are
Q4_0; numbers of 4 bits with other zeros become Q5_0, which holds each difference; int8 becomes
Q8_0. A block stands for the very numbers that the file does, or there is none.
"""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import torch

from tandem.models.gguf.tensors import Blocks

BLOCK = 32


@dataclass(frozen=True, slots=True)
class Groups:
    """A matrix [out, in]; each output has `scales.shape[1]` groups of inputs."""

    numbers: torch.Tensor  # [out, in]: uint8 of 0 to 15, or int8
    zeros: torch.Tensor  # [out, groups] or [1, 1]: uint8 of 0 to 16
    scales: torch.Tensor  # [out, groups] or [1, 1], float32
    group_of_input: torch.Tensor | None = None  # [in]; None: as many inputs after one another each

    def values(self) -> torch.Tensor:
        """Returns float32 [out, in]."""
        zeros = self._of_inputs(self.zeros).short()
        return (self.numbers.short() - zeros) * self._of_inputs(self.scales)

    def blocks(self) -> Blocks | None:
        """Returns blocks of exactly these values; None if there are none such."""
        num_out, num_in = self.numbers.shape
        num_groups = self.scales.shape[1]
        if num_in % BLOCK or (num_in // num_groups) % BLOCK or self.group_of_input is not None:
            return None
        scales = self.scales.half()
        if not torch.equal(scales.float(), self.scales):
            return None
        scales = scales.expand(num_out, num_groups)
        scales = scales.repeat_interleave(num_in // num_groups // BLOCK, 1).contiguous()
        head = scales.unsqueeze(-1).view(torch.uint8)  # [out, blocks, 2]
        if self.numbers.dtype == torch.int8:
            numbers = self.numbers.contiguous().view(torch.uint8).view(num_out, -1, BLOCK)
            return self._of_type("Q8_0", head, numbers)
        if bool((self.zeros == 8).all()):
            return self._of_type("Q4_0", head, _halves(self.numbers.reshape(num_out, -1, BLOCK)))
        numbers = (self.numbers + 16 - self._of_inputs(self.zeros)).view(num_out, -1, BLOCK)
        return self._of_type("Q5_0", head, _fifth_bits(numbers), _halves(numbers & 15))

    def _of_inputs(self, of_groups: torch.Tensor) -> torch.Tensor:
        if of_groups.shape[1] == 1:
            return of_groups
        if self.group_of_input is not None:
            return of_groups[:, self.group_of_input]
        return of_groups.repeat_interleave(self.numbers.shape[1] // of_groups.shape[1], 1)

    def _of_type(self, name: str, *parts: torch.Tensor) -> Blocks:
        data = torch.cat(parts, -1).flatten(1)
        return Blocks(data, gguf.GGMLQuantizationType[name], tuple(self.numbers.shape))


def _halves(numbers: torch.Tensor) -> torch.Tensor:
    """Returns bytes, of which the lower halves are a block's first 16 numbers."""
    first, last = numbers.chunk(2, dim=-1)
    return first | last << 4


def _fifth_bits(numbers: torch.Tensor) -> torch.Tensor:
    """Returns the fifth bit of each number: 4 bytes of a block, the lowest bit first."""
    bits = (numbers >> 4).view(*numbers.shape[:-1], 4, 8)
    return torch.sum(bits << torch.arange(8, dtype=torch.uint8), -1, dtype=torch.uint8)

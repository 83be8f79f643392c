"""A matrix in fp8 (e4m3) with scales, as stored in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tandem.errors import UnsupportedModel

RUN = 128  # in matrices with several scales per output: number of inputs that share a scale
_NAN = 0x7F  # bits of NaN in e4m3, without the sign


@dataclass(frozen=True, slots=True)
class Fp8:
    """An fp8 matrix [out, in]. Each output has either one scale for all inputs, or one scale for
    each `RUN` consecutive inputs (a run)."""

    data: torch.Tensor  # float8_e4m3fn [out, in]
    scales: torch.Tensor  # float32 [out, runs]; runs is 1 if each output has one scale
    source: str = "a matrix"  # file and tensor name, for messages

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def scale_inputs(self) -> int:
        """Number of consecutive inputs that share a scale. The last run of inputs may be
        shorter."""
        return RUN if self.scales.shape[1] > 1 else self.data.shape[1]

    def check_numbers(self) -> None:
        """Raises UnsupportedModel naming the source if a weight is NaN."""
        if bool((self.data.view(torch.uint8) & _NAN == _NAN).any()):
            raise UnsupportedModel(
                f"{self.source} has an fp8 weight that is NaN; all weights must be numbers"
            )

    def numbers(self) -> torch.Tensor:
        """Returns the dequantized matrix, float32 [out, in]."""
        wide = self.data.float()
        for run in range(self.scales.shape[1]):
            inputs = slice(run * self.scale_inputs, (run + 1) * self.scale_inputs)
            wide[:, inputs] *= self.scales[:, run : run + 1]
        return wide

    def between(self, first: int, end: int) -> Fp8:
        """Returns the rows [first, end) as a view of the same memory."""
        return replace(self, data=self.data[first:end], scales=self.scales[first:end])

    def to(self, device: torch.device) -> Fp8:
        return replace(self, data=self.data.to(device), scales=self.scales.to(device))

    def in_order(self, rows: torch.Tensor) -> Fp8:
        """Returns a copy of the rows with the indices `rows`, in that order."""
        data = self.data.view(torch.uint8)[rows].view(self.data.dtype)
        return replace(self, data=data, scales=self.scales.t().index_select(1, rows).t())

    @classmethod
    def joined(cls, parts: Sequence[Fp8]) -> Fp8 | None:
        """Returns one matrix with the rows of several matrices, one after the other. Returns None
        if they do not have the same number of scales per output."""
        if len({part.scales.shape[1] for part in parts}) > 1:
            return None
        data = torch.cat([part.data.view(torch.uint8) for part in parts])
        scales = torch.cat([part.scales.t() for part in parts], 1).t()
        return cls(data.view(parts[0].data.dtype), scales, parts[0].source)

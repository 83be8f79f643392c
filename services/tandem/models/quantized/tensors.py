"""The numbers that quantized tensors of a checkpoint stand for.

The formulas are those of the libraries that write them: transformers (fp8), compressed-tensors,
AutoGPTQ and AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tandem.errors import UnsupportedModel
from tandem.models.checkpoint.quantized_forms import PARTS
from tandem.models.gguf.tensors import Blocks
from tandem.models.quantized.fp8 import Fp8
from tandem.models.quantized.groups import Groups
from tandem.models.quantized.packed_groups import PackedGroups
from tandem.models.quantized.scheme import Scheme

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble that each of eight numbers is in
_FLOAT8 = torch.float8_e4m3fn
_ZERO = torch.zeros(1, 1, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Coded:
    """A quantized matrix of a checkpoint. The shapes and types of its parts were checked
    (models/checkpoint/quantized_forms.py)."""

    name: str  # of the matrix, without .weight
    by_kind: Mapping[str, torch.Tensor]
    scheme: Scheme
    file: Path | None = None  # of its first part; None: of none

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the checkpoint."""
        return tuple(self.by_kind.values())

    @property
    def shape(self) -> tuple[int, ...]:
        """The numbers of outputs and of inputs."""
        rows, columns = self.by_kind[PARTS[self.scheme.coding][0]].shape
        if self.scheme.coding == "gptq":
            return columns, 8 * rows
        if self.scheme.coding == "awq":
            return 8 * columns, rows
        return rows, columns * (32 // self.scheme.bits if self.scheme.coding == "packed" else 1)

    def numbers(self) -> torch.Tensor:
        """Returns float32 [out, in]. Raises UnsupportedModel for a part that does not fit."""
        return self._fp8().numbers() if self.scheme.is_float else self._groups().values()

    def blocks(self) -> Blocks | Fp8 | None:
        """Returns the same numbers, quantized; None if no blocks have exactly these.

        Raises UnsupportedModel for a part that does not fit."""
        return self._fp8() if self.scheme.is_float else self._groups().blocks()

    def packed(self) -> Fp8 | PackedGroups:
        """Returns exactly the same numbers, quantized, as torch and Triton keep them.

        Raises UnsupportedModel for a part that does not fit."""
        return self._fp8() if self.scheme.is_float else self._groups().packed()

    def _groups(self) -> Groups:
        groups = {
            "scaled": self._int8,
            "packed": self._packed,
            "gptq": self._gptq,
            "awq": self._awq,
        }
        return groups[self.scheme.coding]()

    def _fp8(self) -> Fp8:
        num_out, _ = self.shape
        weight, scale = self.by_kind["weight"], self._scale()
        if self.scheme.block is None:
            scales = scale.reshape(-1, 1).expand(num_out, 1)
        else:
            scales = scale.repeat_interleave(self.scheme.block[0], 0)[:num_out]
        return Fp8(weight, scales, source=f"{self.file}: {self.name}.weight")

    def _scale(self) -> torch.Tensor:
        inverse = "weight_scale_inv" in self.by_kind
        return self.by_kind["weight_scale_inv" if inverse else "weight_scale"].float()

    def _int8(self) -> Groups:
        return Groups(self.by_kind["weight"], _ZERO, self._scale().reshape(-1, 1))

    def _packed(self) -> Groups:
        self._demand(tuple(self.by_kind["weight_shape"].tolist()) == self.shape, "weight_shape")
        words = self.by_kind["weight_packed"]
        if self.scheme.bits == 8:  # the lowest bits first, 128 added to each number
            numbers = words.contiguous().view(torch.uint8) ^ 128
            return Groups(numbers.view(torch.int8), _ZERO, self._scale())
        return Groups(_unpacked(words), _ZERO + 8, self._scale())

    def _gptq(self) -> Groups:
        numbers = _unpacked(self.by_kind["qweight"].t())  # [out, in]
        zeros = _unpacked(self.by_kind["qzeros"]).t() + self.scheme.zero_offset
        groups = Groups(numbers, zeros, self.by_kind["scales"].float().t())
        if "g_idx" not in self.by_kind:
            return groups
        num_in, num_groups = numbers.shape[1], zeros.shape[1]
        of_input = self.by_kind["g_idx"].long()
        self._demand(bool(((of_input >= 0) & (of_input < num_groups)).all()), "g_idx")
        in_order = torch.arange(num_in) // (num_in // num_groups)
        return (
            groups if torch.equal(of_input, in_order) else replace(groups, group_of_input=of_input)
        )

    def _awq(self) -> Groups:
        numbers, zeros = (
            _unpacked(self.by_kind[name], _AWQ_ORDER).t() for name in ("qweight", "qzeros")
        )
        return Groups(numbers, zeros, self.by_kind["scales"].float().t())

    def _demand(self, fits: bool, name: str) -> None:
        if not fits:
            raise UnsupportedModel(f"{self.file}: {self.name}.{name} does not fit its matrix")


def join_parts(
    stored: Mapping[str, torch.Tensor], scheme: Scheme, files: Mapping[str, Path]
) -> dict[str, torch.Tensor | Coded]:
    """Returns the tensors of a checkpoint, with the parts of each quantized matrix as one. `files`
    are those of the tensors, by name."""
    names = PARTS[scheme.coding]
    main = names[0]
    joined: dict[str, torch.Tensor | Coded] = dict(stored)
    for name, tensor in stored.items():
        module, _, kind = name.rpartition(".")
        if kind != main or (main == "weight" and tensor.dtype not in (_FLOAT8, torch.int8)):
            continue
        parts = {
            part: joined.pop(f"{module}.{part}") for part in names if f"{module}.{part}" in stored
        }
        joined[f"{module}.weight"] = Coded(module, parts, scheme, files[name])  # type: ignore[arg-type]
    return joined


def _unpacked(words: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Returns the eight numbers of each int32 of a row side by side, as bytes, the lowest bits
    first or in another order."""
    numbers = torch.empty((*words.shape, 8), dtype=torch.uint8)
    for place, nibble in enumerate(order):
        numbers[..., place] = (words >> 4 * nibble) & 15
    return numbers.flatten(-2)

"""The numbers that quantized tensors of a checkpoint stand for.

The formulas are those of the libraries that write them: transformers (fp8), compressed-tensors,
AutoGPTQ and AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tandem.errors import UnsupportedModel
from tandem.models.quantized.scheme import Scheme

_NIBBLES = torch.arange(0, 32, 4, dtype=torch.int32)  # their shifts in an int32
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble that each of eight numbers is in
_PARTS = {
    "scaled": ("weight", "weight_scale", "weight_scale_inv", "input_scale"),
    "packed": ("weight_packed", "weight_scale", "weight_shape", "weight_g_idx"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
}
_MAIN = {"scaled": "weight", "packed": "weight_packed", "gptq": "qweight", "awq": "qweight"}
_FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Coded:
    """A quantized matrix of a checkpoint."""

    name: str  # of the matrix, without .weight
    by_kind: Mapping[str, torch.Tensor]
    scheme: Scheme

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the checkpoint."""
        return tuple(self.by_kind.values())

    @property
    def shape(self) -> tuple[int, ...]:
        """The numbers of outputs and of inputs."""
        main = self.by_kind[_MAIN[self.scheme.coding]]
        if main.ndim != 2:
            raise UnsupportedModel(f"{self.name} has shape {list(main.shape)}; it is no matrix")
        rows, columns = main.shape
        if self.scheme.coding == "gptq":
            return columns, 8 * rows
        if self.scheme.coding == "awq":
            return 8 * columns, rows
        return rows, columns * (8 if self.scheme.coding == "packed" else 1)

    def numbers(self) -> torch.Tensor:
        """Returns float32 [out, in]. Raises UnsupportedModel for a part that does not fit."""
        return {
            "scaled": self._scaled,
            "packed": self._packed,
            "gptq": self._gptq,
            "awq": self._awq,
        }[self.scheme.coding]()

    def _scaled(self) -> torch.Tensor:
        num_out, num_in = self.shape
        weight = self._part("weight", _FLOAT8 if self.scheme.is_float else torch.int8)
        inverse = "weight_scale_inv" in self.by_kind
        scale = self._part("weight_scale_inv" if inverse else "weight_scale")
        if self.scheme.block is None:
            self._demand(scale.numel() in (1, num_out), "weight_scale")
            return weight.float() * scale.float().reshape(-1, 1)
        rows, columns = self.scheme.block
        self._demand(tuple(scale.shape) == (-(-num_out // rows), -(-num_in // columns)), "scales")
        of_rows = scale.float().repeat_interleave(rows, 0)[:num_out]
        return weight.float() * of_rows.repeat_interleave(columns, 1)[:, :num_in]

    def _packed(self) -> torch.Tensor:
        shape = self.shape
        numbers = _unpacked(self._part("weight_packed", torch.int32)) - 8
        stated = self._part("weight_shape", torch.int64)
        self._demand(tuple(stated.tolist()) == shape, "weight_shape")
        scale = self._part("weight_scale").float()
        self._demand(tuple(scale.shape) == (shape[0], self._num_groups(shape[1])), "weight_scale")
        return numbers * scale.repeat_interleave(shape[1] // scale.shape[1], 1)

    def _gptq(self) -> torch.Tensor:
        num_out, num_in = self.shape
        numbers = _unpacked(self._part("qweight", torch.int32).t())  # [out, in]
        zeros = _unpacked(self._part("qzeros", torch.int32)).t() + self.scheme.zero_offset
        scales = self._part("scales").float().t()
        shape = num_out, self._num_groups(num_in)
        self._demand(tuple(zeros.shape) == shape, "qzeros")
        self._demand(tuple(scales.shape) == shape, "scales")
        of_input = torch.arange(num_in) // (num_in // shape[1])
        if "g_idx" in self.by_kind:
            of_input = self._part("g_idx", torch.int32).long()
            self._demand(len(of_input) == num_in, "g_idx")
            self._demand(bool(((of_input >= 0) & (of_input < shape[1])).all()), "g_idx")
        return (numbers - zeros[:, of_input]) * scales[:, of_input]

    def _awq(self) -> torch.Tensor:
        num_out, num_in = self.shape
        numbers, zeros = (
            _unpacked(self._part(name, torch.int32), _AWQ_ORDER).t()
            for name in ("qweight", "qzeros")
        )
        scales = self._part("scales").float().t()
        shape = num_out, self._num_groups(num_in)
        self._demand(tuple(zeros.shape) == shape, "qzeros")
        self._demand(tuple(scales.shape) == shape, "scales")
        size = num_in // shape[1]
        return (numbers - zeros.repeat_interleave(size, 1)) * scales.repeat_interleave(size, 1)

    def _num_groups(self, num_in: int) -> int:
        size = self.scheme.group_size or num_in
        if num_in % size:
            raise UnsupportedModel(
                f"{self.name} has {num_in} inputs, which do not divide into groups of {size}"
            )
        return num_in // size

    def _part(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        part = self.by_kind.get(name)
        if part is None:
            raise UnsupportedModel(f"the checkpoint lacks {self.name}.{name}")
        fits = part.is_floating_point() if dtype is None else part.dtype is dtype
        if not fits:
            wanted = "floating-point numbers" if dtype is None else str(dtype)
            raise UnsupportedModel(f"{self.name}.{name} holds {part.dtype}, not {wanted}")
        return part

    def _demand(self, fits: bool, name: str) -> None:
        if not fits:
            raise UnsupportedModel(f"{self.name}.{name} does not fit its matrix")


def join_parts(
    stored: Mapping[str, torch.Tensor], scheme: Scheme
) -> dict[str, torch.Tensor | Coded]:
    """Returns the tensors of a checkpoint, with the parts of each quantized matrix as one."""
    main, names = _MAIN[scheme.coding], _PARTS[scheme.coding]
    joined: dict[str, torch.Tensor | Coded] = dict(stored)
    for name, tensor in stored.items():
        module, _, kind = name.rpartition(".")
        if kind != main or (main == "weight" and tensor.dtype not in (_FLOAT8, torch.int8)):
            continue
        parts = {
            part: joined.pop(f"{module}.{part}") for part in names if f"{module}.{part}" in stored
        }
        joined[f"{module}.weight"] = Coded(module, parts, scheme)  # type: ignore[arg-type]
    return joined


def _unpacked(words: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Returns the eight numbers of each int32 of a row side by side, the lowest bits first or in
    another order."""
    shifts = _NIBBLES[list(order)]
    return ((words.unsqueeze(-1) >> shifts) & 15).flatten(-2)

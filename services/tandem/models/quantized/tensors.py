"""The numbers that quantized tensors of a checkpoint stand for.

The formulas are those of the libraries that write them: transformers (fp8), compressed-tensors,
AutoGPTQ and AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from tandem.errors import UnsupportedModel
from tandem.models.gguf.tensors import Blocks
from tandem.models.quantized.groups import Groups
from tandem.models.quantized.scheme import Scheme

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble that each of eight numbers is in
_PARTS = {
    "scaled": ("weight", "weight_scale", "weight_scale_inv", "input_scale"),
    "packed": ("weight_packed", "weight_scale", "weight_shape", "weight_g_idx"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
}
_MAIN = {"scaled": "weight", "packed": "weight_packed", "gptq": "qweight", "awq": "qweight"}
_FLOAT8 = torch.float8_e4m3fn
_ZERO = torch.zeros(1, 1, dtype=torch.uint8)


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
        return self._floats() if self.scheme.is_float else self._groups().values()

    def blocks(self) -> Blocks | None:
        """Returns the same numbers as quantized blocks; None if no blocks have exactly these.

        Raises UnsupportedModel for a part that does not fit."""
        return None if self.scheme.is_float else self._groups().blocks()

    def _groups(self) -> Groups:
        groups = {
            "scaled": self._int8,
            "packed": self._packed,
            "gptq": self._gptq,
            "awq": self._awq,
        }
        return groups[self.scheme.coding]()

    def _floats(self) -> torch.Tensor:
        num_out, num_in = self.shape
        weight, scale = self._part("weight", _FLOAT8), self._scale()
        if self.scheme.block is None:
            self._demand(scale.numel() in (1, num_out), "weight_scale")
            return weight.float() * scale.reshape(-1, 1)
        rows, columns = self.scheme.block
        self._demand(tuple(scale.shape) == (-(-num_out // rows), -(-num_in // columns)), "scales")
        of_rows = scale.repeat_interleave(rows, 0)[:num_out]
        return weight.float() * of_rows.repeat_interleave(columns, 1)[:, :num_in]

    def _scale(self) -> torch.Tensor:
        inverse = "weight_scale_inv" in self.by_kind
        return self._part("weight_scale_inv" if inverse else "weight_scale").float()

    def _int8(self) -> Groups:
        weight, scale = self._part("weight", torch.int8), self._scale()
        self._demand(scale.numel() in (1, len(weight)), "weight_scale")
        return Groups(weight, _ZERO, scale.reshape(-1, 1))

    def _packed(self) -> Groups:
        shape = self.shape
        numbers = _unpacked(self._part("weight_packed", torch.int32))
        stated = self._part("weight_shape", torch.int64)
        self._demand(tuple(stated.tolist()) == shape, "weight_shape")
        scale = self._part("weight_scale").float()
        self._demand(tuple(scale.shape) == (shape[0], self._num_groups(shape[1])), "weight_scale")
        return Groups(numbers, _ZERO + 8, scale)

    def _gptq(self) -> Groups:
        numbers = _unpacked(self._part("qweight", torch.int32).t())  # [out, in]
        zeros = _unpacked(self._part("qzeros", torch.int32)).t() + self.scheme.zero_offset
        groups = self._checked(numbers, zeros)
        if "g_idx" not in self.by_kind:
            return groups
        num_in, num_groups = numbers.shape[1], zeros.shape[1]
        of_input = self._part("g_idx", torch.int32).long()
        self._demand(len(of_input) == num_in, "g_idx")
        self._demand(bool(((of_input >= 0) & (of_input < num_groups)).all()), "g_idx")
        in_order = torch.arange(num_in) // (num_in // num_groups)
        return (
            groups if torch.equal(of_input, in_order) else replace(groups, group_of_input=of_input)
        )

    def _awq(self) -> Groups:
        numbers, zeros = (
            _unpacked(self._part(name, torch.int32), _AWQ_ORDER).t()
            for name in ("qweight", "qzeros")
        )
        return self._checked(numbers, zeros)

    def _checked(self, numbers: torch.Tensor, zeros: torch.Tensor) -> Groups:
        num_out, num_in = self.shape
        scales = self._part("scales").float().t()
        shape = num_out, self._num_groups(num_in)
        self._demand(tuple(zeros.shape) == shape, "qzeros")
        self._demand(tuple(scales.shape) == shape, "scales")
        return Groups(numbers, zeros, scales)

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
    """Returns the eight numbers of each int32 of a row side by side, as bytes, the lowest bits
    first or in another order."""
    numbers = torch.empty((*words.shape, 8), dtype=torch.uint8)
    for place, nibble in enumerate(order):
        numbers[..., place] = (words >> 4 * nibble) & 15
    return numbers.flatten(-2)

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
from tandem.models.checkpoint.quantized.forms import PARTS
from tandem.models.checkpoint.quantized.fp8 import Fp8
from tandem.models.checkpoint.quantized.groups import QuantizedGroups
from tandem.models.checkpoint.quantized.packed_groups import PackedGroups
from tandem.models.config.quantization_scheme import Quantization, Scheme
from tandem.models.gguf.tensors import Blocks

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble that each of eight numbers is in
_FLOAT8 = torch.float8_e4m3fn
_ZERO = torch.zeros(1, 1, dtype=torch.uint8)
_WORD_BITS = 32
_MIDDLE = 128  # of the numbers of 8 bits, which int8 has as 0
_UNSET = -1  # in weight_g_idx, of a matrix whose inputs are in no other order


@dataclass(frozen=True, slots=True)
class Coded:
    """A quantized matrix of a checkpoint. The shapes and types of its parts were checked
    (models/checkpoint/quantized/forms.py)."""

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
        word = _WORD_BITS // self.scheme.bits
        if self.scheme.coding == "gptq":
            return columns, word * rows
        if self.scheme.coding == "awq":
            return word * columns, rows
        return rows, columns * (word if self.scheme.coding == "packed" else 1)

    def check(self) -> None:
        """Reads the small parts whose values a header does not tell. Raises UnsupportedModel naming
        one that does not fit."""
        if self.scheme.coding == "packed":
            self._demand(tuple(self.by_kind["weight_shape"].tolist()) == self.shape, "weight_shape")
        if self.scheme.coding == "gptq" and self.scheme.bits == 8:
            zeros = _bytes_of(self.by_kind["qzeros"]) + self.scheme.zero_offset
            self._demand(bool((zeros == _MIDDLE).all()), "qzeros")
        if (of_input := self._group_of_input()) is not None:
            num_groups = self.shape[1] // (self.scheme.group_size or self.shape[1])
            fits = (of_input >= 0) & (of_input < num_groups)
            self._demand(bool(fits.all()), self._order)

    def numbers(self) -> torch.Tensor:
        """Returns float32 [out, in]."""
        return self._fp8().numbers() if self.scheme.is_float else self._groups().values()

    def blocks(self) -> Blocks | Fp8 | None:
        """Returns the same numbers, quantized; None if no blocks have exactly these."""
        return self._fp8() if self.scheme.is_float else self._groups().blocks()

    def packed(self) -> Fp8 | PackedGroups:
        """Returns exactly the same numbers, quantized, as torch and Triton keep them."""
        return self._fp8() if self.scheme.is_float else self._groups().packed()

    def _groups(self) -> QuantizedGroups:
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

    def _int8(self) -> QuantizedGroups:
        return QuantizedGroups(self.by_kind["weight"], _ZERO, self._scale().reshape(-1, 1))

    def _packed(self) -> QuantizedGroups:
        numbers, zeros = self._integers(self.by_kind["weight_packed"])
        if self.scheme.has_zeros:  # of outputs in words that the last one may not fill
            zeros = _unpacked(self.by_kind["weight_zero_point"].t())[:, : len(numbers)].t()
        return self._in_their_order(QuantizedGroups(numbers, zeros, self._scale()))

    def _gptq(self) -> QuantizedGroups:
        numbers, zeros = self._integers(self.by_kind["qweight"].t())
        if self.scheme.bits == 4:
            zeros = _unpacked(self.by_kind["qzeros"]).t() + self.scheme.zero_offset
        return self._in_their_order(
            QuantizedGroups(numbers, zeros, self.by_kind["scales"].float().t())
        )

    def _awq(self) -> QuantizedGroups:
        numbers, zeros = (
            _unpacked(self.by_kind[name], _AWQ_ORDER).t() for name in ("qweight", "qzeros")
        )
        return QuantizedGroups(numbers, zeros, self.by_kind["scales"].float().t())

    def _integers(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the numbers of rows of words, and the zero of all if their scheme has one."""
        if self.scheme.bits == 4:
            return _unpacked(words), _ZERO + 8
        return (_bytes_of(words) ^ _MIDDLE).view(torch.int8), _ZERO

    def _in_their_order(self, groups: QuantizedGroups) -> QuantizedGroups:
        """Returns the same with the groups of inputs that the checkpoint tells."""
        if (of_input := self._group_of_input()) is None:
            return groups
        num_in, num_groups = groups.numbers.shape[1], groups.scales.shape[1]
        if torch.equal(of_input, torch.arange(num_in) // (num_in // num_groups)):
            return groups
        return replace(groups, group_of_input=of_input)

    def _group_of_input(self) -> torch.Tensor | None:
        """Returns the group of each input, int64 [in]; None if as many inputs follow one another
        in each."""
        if self._order not in self.by_kind:
            return None
        of_input = self.by_kind[self._order].long()
        is_unset = self.scheme.coding == "packed" and bool((of_input == _UNSET).all())
        return None if is_unset else of_input

    @property
    def _order(self) -> str:
        return "weight_g_idx" if self.scheme.coding == "packed" else "g_idx"

    def _demand(self, fits: bool, name: str) -> None:
        if not fits:
            raise UnsupportedModel(f"{self.file}: {self.name}.{name} does not fit its matrix")


def join_parts(
    stored: Mapping[str, torch.Tensor], quantization: Quantization, files: Mapping[str, Path]
) -> dict[str, torch.Tensor | Coded]:
    """Returns the tensors of a checkpoint, with the parts of each quantized matrix as one. `files`
    are those of the tensors, by name.

    Raises UnsupportedModel for a part that does not fit its matrix."""
    joined: dict[str, torch.Tensor | Coded] = dict(stored)
    for name, tensor in stored.items():
        module, _, kind = name.rpartition(".")
        scheme = quantization.of(module)
        if scheme is None or kind != PARTS[scheme.coding][0]:
            continue
        if kind == "weight" and tensor.dtype not in (_FLOAT8, torch.int8):
            continue
        names = {part: f"{module}.{part}" for part in PARTS[scheme.coding]}
        parts = {part: stored[each] for part, each in names.items() if each in stored}
        for each in names.values():
            joined.pop(each, None)
        coded = Coded(module, parts, scheme, files[name])
        coded.check()
        joined[f"{module}.weight"] = coded
    return joined


def _unpacked(words: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Returns the eight numbers of each int32 of a row side by side, as bytes, the lowest bits
    first or in another order."""
    pairs = _bytes_of(words).view(*words.shape, 4)
    numbers = torch.empty((*words.shape, 8), dtype=torch.uint8)
    for place, nibble in enumerate(order):  # by bytes, so that little is made beside them
        pair = pairs[..., nibble // 2]
        numbers[..., place] = pair >> 4 if nibble % 2 else pair & 15
    return numbers.flatten(-2)


def _bytes_of(words: torch.Tensor) -> torch.Tensor:
    """Returns the four numbers of each int32 of a row side by side, the lowest bits first."""
    return words.contiguous().view(torch.uint8)

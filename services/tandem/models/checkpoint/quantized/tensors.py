"""Decodes quantized matrices from the tensors of a checkpoint.

The formulas are those of the libraries that write the checkpoints: transformers (fp8),
compressed-tensors, AutoGPTQ and AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import torch

from tandem.errors import UnsupportedModel
from tandem.models.checkpoint.expert_names import MXFP4_BLOCK
from tandem.models.checkpoint.quantized.forms import PARTS
from tandem.models.checkpoint.quantized.fp8 import Fp8
from tandem.models.checkpoint.quantized.groups import QuantizedGroups
from tandem.models.checkpoint.quantized.packed_groups import PackedGroups
from tandem.models.config.quantization_scheme import Quantization, Scheme
from tandem.models.gguf.tensors import GgufBlocks

# AWQ stores number i of a 32-bit word in nibble _AWQ_ORDER[i]: number 1 is in nibble 4.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_FLOAT8 = torch.float8_e4m3fn
_ZERO = torch.zeros(1, 1, dtype=torch.uint8)
# The numbers of the codes of E2M1.
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1 = torch.cat([_E2M1, -_E2M1])
_WORD_BITS = 32
_MIDDLE = 128  # zero point of unsigned 8-bit numbers
_UNSET = -1  # a weight_g_idx full of this number means that groups have consecutive inputs


@dataclass(frozen=True, slots=True)
class Coded:
    """The tensors in which a checkpoint stores one quantized matrix. check.py has already checked
    the shapes and types of the tensors."""

    name: str  # name of the module, without .weight
    by_kind: Mapping[str, torch.Tensor]  # last part of the stored name (forms.PARTS) -> tensor
    scheme: Scheme
    file: Path | None = None  # file with the first tensor; None: the matrix is not from a file

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The stored tensors of this matrix."""
        return tuple(self.by_kind.values())

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix's number of outputs and number of inputs."""
        rows, columns = self.by_kind[PARTS[self.scheme.coding][0]].shape
        word = _WORD_BITS // self.scheme.bits
        if self.scheme.coding == "fp4":
            return rows, 2 * columns
        if self.scheme.coding == "gptq":
            return columns, word * rows
        if self.scheme.coding == "awq":
            return word * columns, rows
        return rows, columns * (word if self.scheme.coding == "packed" else 1)

    def check(self) -> None:
        """Checks values that headers do not show: the stored shape, zero points and group numbers.
        Raises UnsupportedModel naming the tensor that does not fit the matrix."""
        if self.scheme.coding == "packed":
            self._require(
                tuple(self.by_kind["weight_shape"].tolist()) == self.shape,
                "weight_shape",
                f"the value must be {list(self.shape)}",
            )
        if self.scheme.coding == "gptq" and self.scheme.bits == 8:
            zeros = _bytes_of(self.by_kind["qzeros"]) + self.scheme.zero_offset
            self._require(
                bool((zeros == _MIDDLE).all()),
                "qzeros",
                f"all zero points of 8-bit weights must be {_MIDDLE}",
            )
        if (of_input := self._group_of_input()) is not None:
            num_groups = self.shape[1] // (self.scheme.group_size or self.shape[1])
            fits = (of_input >= 0) & (of_input < num_groups)
            self._require(
                bool(fits.all()),
                self._order,
                f"all group numbers must be from 0 to {num_groups - 1}",
            )

    def numbers(self) -> torch.Tensor:
        """Returns the dequantized matrix, float32 [out, in]."""
        if self.scheme.coding == "fp4":
            return self._fp4()
        return self._fp8().numbers() if self.scheme.is_float else self._groups().values()

    def blocks(self) -> GgufBlocks | Fp8 | None:
        """Returns the matrix in the format of the native kernels, with exactly the same values;
        None if no block type represents the values."""
        if self.scheme.coding == "fp4":
            return self._mxfp4() if self.scheme.group_size == MXFP4_BLOCK else None
        return self._fp8() if self.scheme.is_float else self._groups().blocks()

    def packed(self) -> Fp8 | PackedGroups | None:
        """Returns the matrix in the format of the torch and Triton kernels, with exactly the same
        values; None if no such format represents the values."""
        if self.scheme.coding == "fp4":
            blocks = self.blocks()
            return PackedGroups.of_blocks(blocks) if isinstance(blocks, GgufBlocks) else None
        return self._fp8() if self.scheme.is_float else self._groups().packed()

    def _fp4(self) -> torch.Tensor:
        """Returns the numbers of NVFP4 or MXFP4."""
        if self.scheme.group_size == MXFP4_BLOCK:
            return self._mxfp4().numbers()
        numbers = _E2M1[self._codes().long()].view(self.shape[0], -1, self.scheme.group_size)
        scales = self.by_kind["weight_scale"].float() / self.by_kind["weight_global_scale"].float()
        return (numbers * scales.unsqueeze(-1)).flatten(1)

    def _mxfp4(self) -> GgufBlocks:
        """Returns MXFP4 numbers in the layout of GGUF files: a block has a scale, and the codes of
        inputs i and i + 16 in byte i."""
        first, last = self._codes().view(self.shape[0], -1, MXFP4_BLOCK).chunk(2, -1)
        scales = self.by_kind["weight_scale"].unsqueeze(-1)
        data = torch.cat([scales, first | last << 4], -1).flatten(1)
        return GgufBlocks(data, gguf.GGMLQuantizationType.MXFP4, self.shape)

    def _codes(self) -> torch.Tensor:
        """Returns the 4-bit codes, uint8 [out, in]. A byte has two, the first in the low bits."""
        pairs = self.by_kind["weight_packed"]
        return torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)

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
        weight = self.by_kind["weight"]
        scale = self._scale()
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
        # Each word has the zero points of 8 outputs. Unused zero points of the last word are cut.
        if self.scheme.has_zeros:
            zeros = _unpacked(self.by_kind["weight_zero_point"].t())[:, : len(numbers)].t()
        return self._with_group_order(QuantizedGroups(numbers, zeros, self._scale()))

    def _gptq(self) -> QuantizedGroups:
        numbers, zeros = self._integers(self.by_kind["qweight"].t())
        if self.scheme.bits == 4:
            zeros = _unpacked(self.by_kind["qzeros"]).t() + self.scheme.zero_offset
        return self._with_group_order(
            QuantizedGroups(numbers, zeros, self.by_kind["scales"].float().t())
        )

    def _awq(self) -> QuantizedGroups:
        numbers, zeros = (
            _unpacked(self.by_kind[name], _AWQ_ORDER).t() for name in ("qweight", "qzeros")
        )
        return QuantizedGroups(numbers, zeros, self.by_kind["scales"].float().t())

    def _integers(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Unpacks int32 words into 4-bit or 8-bit numbers. Returns the numbers, and the zero point
        to use if the checkpoint stores none, uint8 [1, 1]."""
        if self.scheme.bits == 4:
            return _unpacked(words), _ZERO + 8
        return (_bytes_of(words) ^ _MIDDLE).view(torch.int8), _ZERO

    def _with_group_order(self, groups: QuantizedGroups) -> QuantizedGroups:
        """Returns `groups` with the field `group_of_input` set. If the groups consist of
        consecutive inputs, returns `groups` unchanged."""
        if (of_input := self._group_of_input()) is None:
            return groups
        num_in = groups.numbers.shape[1]
        num_groups = groups.scales.shape[1]
        if torch.equal(of_input, torch.arange(num_in) // (num_in // num_groups)):
            return groups
        return replace(groups, group_of_input=of_input)

    def _group_of_input(self) -> torch.Tensor | None:
        """Returns the group of each input, int64 [in]; None if each group consists of consecutive
        inputs."""
        if self._order not in self.by_kind:
            return None
        of_input = self.by_kind[self._order].long()
        is_unset = self.scheme.coding == "packed" and bool((of_input == _UNSET).all())
        return None if is_unset else of_input

    @property
    def _order(self) -> str:
        return "weight_g_idx" if self.scheme.coding == "packed" else "g_idx"

    def _require(self, fits: bool, name: str, must: str) -> None:
        if not fits:
            raise UnsupportedModel(
                f"{self.file}: the tensor {self.name}.{name} does not fit the matrix {self.name}; "
                f"{must}"
            )


def join_parts(
    stored: Mapping[str, torch.Tensor], quantization: Quantization, files: Mapping[str, Path]
) -> dict[str, torch.Tensor | Coded]:
    """Replaces the tensors of each quantized matrix in `stored` by one `Coded`. For example,
    NAME.qweight, NAME.qzeros and NAME.scales become one entry. `files` maps tensor names to files.
    Raises UnsupportedModel naming a tensor whose values do not fit the matrix."""
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
    """Unpacks each int32 of a row into eight 4-bit numbers, uint8 [..., 8 * words]. Number i is in
    nibble order[i]; nibble 0 has the lowest bits."""
    pairs = _bytes_of(words).view(*words.shape, 4)
    numbers = torch.empty((*words.shape, 8), dtype=torch.uint8)
    # A pass for each of the eight numbers keeps temporary tensors small.
    for place, nibble in enumerate(order):
        pair = pairs[..., nibble // 2]
        numbers[..., place] = pair >> 4 if nibble % 2 else pair & 15
    return numbers.flatten(-2)


def _bytes_of(words: torch.Tensor) -> torch.Tensor:
    """Returns the four bytes of each int32 of a row, lowest first."""
    return words.contiguous().view(torch.uint8)

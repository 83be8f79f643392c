"""Maps the tensors of a GGUF file, under Hugging Face's names; what is quantized stays so."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import TypeAlias

import gguf
import torch

from tandem.errors import UnsupportedModel
from tandem.models.config.model import ModelConfig
from tandem.models.gguf.headers import read_headers
from tandem.models.gguf.layout import StoredTensor
from tandem.models.gguf.names import num_permuted_heads, stored_offset
from tandem_kernels.blocks import Q4_Z32, Q4_Z64, TYPES, widen
from tandem_kernels.native import library

_DENSE = {
    gguf.GGMLQuantizationType.F32: torch.float32,
    gguf.GGMLQuantizationType.F16: torch.float16,
    gguf.GGMLQuantizationType.BF16: torch.bfloat16,
}


class ZeroedType(IntEnum):
    """A type of blocks with a zero for 32 or 64 inputs. No GGUF file has it."""

    Q4_Z32 = Q4_Z32
    Q4_Z64 = Q4_Z64


BlocksType: TypeAlias = gguf.GGMLQuantizationType | ZeroedType


@dataclass(frozen=True, slots=True)
class Blocks:
    """A tensor as a GGUF file has it: rows of quantized blocks, or of plain numbers."""

    data: torch.Tensor  # uint8 [rows, bytes of a row]
    type: BlocksType
    shape: tuple[int, ...]  # of the numbers
    offset: float = 0.0  # of plain numbers, to be taken away
    num_heads: int = 0  # whose rows are in llama.cpp's order; 0: all rows are in order
    order: torch.Tensor | None = None  # int32: the input at each place of a row; None: in order

    @property
    def dtype(self) -> torch.dtype | None:
        """The type of plain numbers; None if they are quantized."""
        return _DENSE.get(self.type)

    def rows(self) -> torch.Tensor:
        """Returns `data` in Hugging Face's order of rows."""
        return unpermute(self.data, self.num_heads) if self.num_heads else self.data

    def matrices(self) -> list[Blocks]:
        """Returns the matrices of a tensor of three dimensions, which share its memory."""
        num, *shape = self.shape
        return [replace(self, data=each, shape=tuple(shape)) for each in self.data.chunk(num)]

    def in_order(self, rows: torch.Tensor) -> Blocks:
        """Returns a copy of a matrix whose rows are these of Hugging Face's."""
        shape = len(rows), self.shape[-1]
        return replace(self, data=self.rows()[rows], shape=shape, num_heads=0)

    def between(self, first: int, end: int) -> Blocks:
        """Returns some rows of a matrix, in the order in which they lie. They share its memory."""
        return replace(self, data=self.data[first:end], shape=(end - first, self.shape[-1]))

    def to(self, device: torch.device) -> Blocks:
        """Returns the same on a device, with rows in Hugging Face's order."""
        return replace(self, data=self.rows().to(device), num_heads=0)

    def numbers(self) -> torch.Tensor:
        """Returns plain numbers as they are, others in float32.

        Raises UnsupportedModel for a type that nobody here can dequantize.
        """
        rows = self.rows()
        if self.dtype is not None:
            numbers = rows.view(self.dtype).reshape(self.shape)
            return numbers.float() - self.offset if self.offset else numbers
        if rows.device.type == "cpu" and (native := library.load()):
            wide = torch.empty(self.shape)
            size = len(rows), self.shape[-1]
            if native.widen_blocks(rows.data_ptr(), self.type, size, wide.data_ptr()):
                return self._in_order_of_inputs(wide)
        if can_widen(self.type):
            return self._in_order_of_inputs(widen(rows, self.type).view(self.shape))
        try:
            return torch.from_numpy(gguf.dequantize(rows.numpy(), self.type)).reshape(self.shape)
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"a tensor is of type {self.type.name}, which the gguf package cannot dequantize"
            ) from error

    def _in_order_of_inputs(self, numbers: torch.Tensor) -> torch.Tensor:
        if self.order is None:
            return numbers
        ordered = torch.empty_like(numbers)
        ordered[:, self.order.long()] = numbers
        return ordered


def is_packed(block_type: BlocksType) -> bool:
    """Returns whether the native kernels multiply with blocks of this type."""
    native = library.load()
    return native is not None and native.kind_of_blocks(block_type) is not None


def can_widen(block_type: BlocksType) -> bool:
    """Returns whether torch makes numbers of such blocks on any device."""
    return block_type in TYPES


def read_tensors(files: Sequence[Path], config: ModelConfig) -> dict[str, Blocks]:
    """Returns all tensors of a model's files. A file stays mapped as long as one of them lives.

    Raises ConfigError for a file that is not whole, and UnsupportedModel naming a tensor that has
    no place in the architecture.
    """
    headers = read_headers(files, config.architecture)
    data = {file: _map(file) for file in files}
    return {name: _blocks(data[each.file], each, config) for name, each in headers.items()}


def unpermute(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undoes llama.cpp's order of a head's rows: pairs side by side -> first and second half.

    GGUF's llama rotates neighbouring rows (2i, 2i+1), Hugging Face's rows (i, i + head_dim / 2).
    `rows`: [num_heads * head_dim, ...] of a weight or a bias.
    """
    half = len(rows) // num_heads // 2
    pairs = rows.view(num_heads, half, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _map(file: Path) -> torch.Tensor:
    """Returns the file's bytes. They may be written to, as torch demands, which copies a page."""
    with file.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _blocks(data: torch.Tensor, stored: StoredTensor, config: ModelConfig) -> Blocks:
    num_heads = num_permuted_heads(stored.name, config)
    if num_heads and stored.shape[0] % (2 * num_heads):
        raise UnsupportedModel(
            f"{stored.name} has {stored.shape[0]} rows, which do not divide into {num_heads} heads"
        )
    num_rows = stored.shape[0] if num_heads else math.prod(stored.shape[:-1])
    rows = data[stored.begin : stored.end].view(num_rows, -1)
    offset = stored_offset(stored.name, config.architecture)
    return Blocks(rows, stored.type, stored.shape, offset, num_heads)

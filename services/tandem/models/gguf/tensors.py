"""Maps the tensors of GGUF files into memory under Hugging Face names, without dequantization."""

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
from tandem.models.config.linear_attention import GatedDelta
from tandem.models.config.model import ModelConfig
from tandem.models.gguf.headers import read_headers
from tandem.models.gguf.layout import StoredTensor
from tandem.models.gguf.names import A_LOG, has_tiled_heads, num_permuted_heads, stored_offset
from tandem_kernels.blocks import Q4_Z32, Q4_Z64, TYPES, widen
from tandem_kernels.native import library

_DENSE = {
    gguf.GGMLQuantizationType.F32: torch.float32,
    gguf.GGMLQuantizationType.F16: torch.float16,
    gguf.GGMLQuantizationType.BF16: torch.bfloat16,
}


class ZeroedType(IntEnum):
    """Block types that have a zero point for each block of 32 or 64 inputs. GGUF files do not have
    these types; quantized matrices of other checkpoints are converted to them."""

    Q4_Z32 = Q4_Z32
    Q4_Z64 = Q4_Z64


BlocksType: TypeAlias = gguf.GGMLQuantizationType | ZeroedType


@dataclass(frozen=True, slots=True)
class GgufBlocks:
    """A tensor in GGUF's format. Each row consists of quantized blocks or of unquantized
    numbers."""

    data: torch.Tensor  # uint8 [rows, bytes of a row]
    type: BlocksType
    shape: tuple[int, ...]  # shape of the dequantized tensor; sizes count weights, not bytes
    # `numbers` subtracts this from unquantized values: 1 for Gemma's norm weights, otherwise 0.
    offset: float = 0.0
    # 0: the rows are in Hugging Face's order. Otherwise the number of heads, and the rows of each
    # head are in llama.cpp's order (see `unpermute`).
    num_heads: int = 0
    # int64 [rows]: row i in Hugging Face's order is the stored row row_order[i]. None: see
    # `num_heads`.
    row_order: torch.Tensor | None = None
    # True: the unquantized values are -exp(value of the Hugging Face file).
    is_decay: bool = False
    # int32 [in]: position p of a stored row has the weight of input order[p]. None: the inputs are
    # stored in their own order.
    order: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of unquantized numbers; None if the tensor is quantized."""
        return _DENSE.get(self.type)

    def rows(self) -> torch.Tensor:
        """Returns `data` with rows in Hugging Face's order."""
        if self.row_order is not None:
            return self.data[self.row_order]
        return unpermute(self.data, self.num_heads) if self.num_heads else self.data

    def matrices(self) -> list[GgufBlocks]:
        """Splits a 3-dimensional tensor into its matrices, as views of the same memory."""
        num, *shape = self.shape
        return [replace(self, data=each, shape=tuple(shape)) for each in self.data.chunk(num)]

    def in_order(self, rows: torch.Tensor) -> GgufBlocks:
        """Returns a copy of the rows with the indices `rows`, counted in Hugging Face's order."""
        shape = len(rows), self.shape[-1]
        data = self.rows()[rows] if self.row_order is None else self.data[self.row_order[rows]]
        return replace(self, data=data, shape=shape, num_heads=0, row_order=None)

    def between(self, first: int, end: int) -> GgufBlocks:
        """Returns the rows [first, end), counted in stored order, as a view of the same memory."""
        return replace(self, data=self.data[first:end], shape=(end - first, self.shape[-1]))

    def to(self, device: torch.device) -> GgufBlocks:
        """Copies the tensor to a device, with rows in Hugging Face's order."""
        return replace(self, data=self.rows().to(device), num_heads=0, row_order=None)

    def numbers(self) -> torch.Tensor:
        """Returns the values: unquantized tensors in their own dtype, quantized ones in float32.

        Raises UnsupportedModel for a type that cannot be dequantized.
        """
        rows = self.rows()
        if self.dtype is not None:
            numbers = self._in_order_of_inputs(rows.view(self.dtype).reshape(self.shape))
            if self.is_decay:
                return torch.log(-numbers.float())
            return numbers.float() - self.offset if self.offset else numbers
        if rows.device.type == "cpu" and (native := library.load()):
            wide = torch.empty(self.shape)
            size = len(rows), self.shape[-1]
            if native.widen_blocks(rows.data_ptr(), self.type, size, wide.data_ptr()):
                return self._in_order_of_inputs(wide)
        if can_widen(self.type):
            return self._in_order_of_inputs(widen(rows, self.type).view(self.shape))
        try:
            wide = torch.from_numpy(gguf.dequantize(rows.numpy(), self.type))
            return self._in_order_of_inputs(wide.reshape(self.shape))
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
    """Returns whether the native kernels can multiply with blocks of this type."""
    native = library.load()
    return native is not None and native.kind_of_blocks(block_type) is not None


def can_widen(block_type: BlocksType) -> bool:
    """Returns whether torch code can dequantize blocks of this type on any device."""
    return block_type in TYPES


def read_tensors(files: Sequence[Path], config: ModelConfig) -> dict[str, GgufBlocks]:
    """Returns a model's tensors by their Hugging Face names. A file stays mapped while one of its
    tensors exists.

    Raises ConfigError for a truncated or invalid file, and UnsupportedModel naming a tensor that
    the architecture does not have.
    """
    headers = read_headers(files, config.architecture)
    data = {file: _map(file) for file in files}
    return {name: _blocks(name, data[each.file], each, config) for name, each in headers.items()}


def unpermute(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorders the rows of each head from llama.cpp's order to Hugging Face's.

    RoPE rotates rows (2i, 2i + 1) of a head in GGUF files, and rows (i, i + head_dim / 2) in
    Hugging Face files. `rows` is a weight or a bias, [num_heads * head_dim, ...].
    """
    half = len(rows) // num_heads // 2
    pairs = rows.view(num_heads, half, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _map(file: Path) -> torch.Tensor:
    """Maps a file as a uint8 tensor. The mapping is copy-on-write, because torch requires writable
    memory."""
    with file.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _blocks(name: str, data: torch.Tensor, stored: StoredTensor, config: ModelConfig) -> GgufBlocks:
    if has_tiled_heads(config.architecture) and "linear_attn." in name:
        return _of_tiled_heads(name, data, stored, config)
    num_heads = num_permuted_heads(stored.name, config)
    if num_heads and stored.shape[0] % (2 * num_heads):
        raise UnsupportedModel(
            f"{stored.name} has {stored.shape[0]} rows; the number of rows must be a multiple "
            f"of {2 * num_heads}, twice the number of heads"
        )
    num_rows = stored.shape[0] if num_heads else math.prod(stored.shape[:-1])
    rows = data[stored.begin : stored.end].view(num_rows, -1)
    offset = stored_offset(stored.name, config.architecture)
    return GgufBlocks(
        rows, stored.type, stored.shape, offset, num_heads, is_decay=name.endswith(A_LOG)
    )


def _of_tiled_heads(
    name: str, data: torch.Tensor, stored: StoredTensor, config: ModelConfig
) -> GgufBlocks:
    """Returns a tensor of a layer with linear attention whose value heads are in llama.cpp's order
    (`has_tiled_heads`)."""
    sizes = next(layer.linear for layer in config.layers if isinstance(layer.linear, GatedDelta))
    heads = sizes.group, sizes.num_key_heads
    bytes_of_tensor = data[stored.begin : stored.end]
    is_decay = name.endswith(A_LOG)
    if name.endswith("out_proj.weight"):
        order = torch.arange(sizes.num_value_heads * sizes.value_dim, dtype=torch.int32)
        order = order.view(*reversed(heads), -1).transpose(0, 1).flatten()
        rows = bytes_of_tensor.view(stored.shape[0], -1)
        is_same = sizes.group == 1
        return GgufBlocks(rows, stored.type, stored.shape, order=None if is_same else order)
    if name.endswith("norm.weight"):
        return GgufBlocks(bytes_of_tensor.view(1, -1), stored.type, stored.shape)
    # The rows of the value heads, which are the last ones of the tensor.
    num = sizes.num_value_heads
    if name.endswith(("qkv.weight", "z.weight", "conv1d.weight")):
        num *= sizes.value_dim
    first = stored.shape[0] - num
    if first < 0:
        raise UnsupportedModel(
            f"{stored.name} has {stored.shape[0]} rows; it must have at least {num}"
        )
    of_values = torch.arange(num).view(*heads, -1).transpose(0, 1).flatten()
    row_order = torch.cat([torch.arange(first), first + of_values])
    rows = bytes_of_tensor.view(stored.shape[0], -1)
    return GgufBlocks(rows, stored.type, stored.shape, row_order=row_order, is_decay=is_decay)

"""Returns the tensors of a checkpoint by name, converted to the compute dtype and moved to the
device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from tandem.engine.executor.weights.checkpoint import Stored
from tandem.engine.executor.weights.decoder_weights import Linear, Quantized, joined
from tandem.engine.executor.weights.mxfp4 import (
    Mxfp4,
)
from tandem.engine.executor.weights.released_memory import FilePages, release_freed_memory
from tandem.models.checkpoint.quantized.fp8 import Fp8
from tandem.models.checkpoint.quantized.packed_groups import PackedGroups, by_columns
from tandem.models.checkpoint.quantized.tensors import Coded
from tandem.models.gguf.tensors import GgufBlocks, can_widen, is_packed

# The kernels that will use the weights. A quantized matrix stays quantized if these kernels can
# read its format. "": all matrices are dequantized.
KeptFor = Literal["", "native", "torch", "triton"]

log = logging.getLogger(__name__)


class TensorsByName:
    """The tensors of a checkpoint. Each method returns tensors by name, in a form that the decoders
    can use."""

    def __init__(
        self,
        stored: Stored,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kept_for: KeptFor,
        pages: FilePages,
    ) -> None:
        """`pages` has the address ranges at which the files are mapped. After a tensor is
        converted, the tensor's pages are dropped from memory."""
        self._stored = stored
        self._kept_for = kept_for
        self._pages = pages
        self._dtype = dtype
        self._device = device
        self._has_warned = False  # True: the warning of `_warn_converted` was already logged

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def tensor(self, name: str) -> torch.Tensor:
        stored = self.dense(name)
        tensor = stored.to(device=self._device, dtype=self._dtype)
        if tensor is not stored:
            self._drop(name)
        return tensor

    def ones(self, num: int) -> torch.Tensor:
        """Returns `num` ones in the compute dtype."""
        return torch.ones(num, dtype=self._dtype, device=self._device)

    def floats(self, name: str) -> torch.Tensor:
        return self.dense(name).to(device=self._device, dtype=torch.float32)

    def integers(self, name: str) -> torch.Tensor:
        return self.dense(name).to(device=self._device, dtype=torch.long)

    def dense(self, name: str) -> torch.Tensor:
        """Returns a tensor in the dtype of the checkpoint. A quantized tensor is dequantized."""
        stored = self._stored[name]
        return stored if isinstance(stored, torch.Tensor) else stored.numbers()

    def matrix(self, name: str) -> Linear:
        """Returns the matrix, or the tensor with the matrices of all experts, that has this name.
        The bias is left out. A quantized matrix stays quantized if the kernels can read its
        format."""
        return self.matrices([name])[0]

    def matrices(self, names: Sequence[str]) -> list[Linear]:
        """Returns matrices without their biases. Either all of them stay quantized or none does."""
        return self.quantized(names) or [Linear(self.tensor(name), None) for name in names]

    def quantized(self, names: Sequence[str]) -> list[Linear]:
        """Returns matrices in quantized form, without their biases.

        Returns an empty list if the kernels cannot read the format of one of the matrices. For the
        native kernels, the list is also empty if some of the matrices are fp8 and others have
        integer formats, because these kernels cannot multiply such matrices in one product.
        """
        found = []
        for name in names:
            blocks = self._kept(name)
            if blocks is None:
                return []
            found.append(Linear(self._without_data(blocks), None, blocks))
        is_mixed = len({isinstance(each.blocks, Fp8) for each in found}) > 1
        return [] if is_mixed and self._kept_for == "native" else found

    def linear(self, name: str) -> Linear:
        """Returns a matrix with its bias, if the checkpoint has one."""
        return self.with_bias(self.matrix(f"{name}.weight"), f"{name}.bias")

    def with_bias(self, matrix: Linear, name: str) -> Linear:
        """Returns the matrix with the bias of this name, if the checkpoint has one."""
        return replace(matrix, bias=self.tensor(name)) if name in self else matrix

    def joined(self, *names: str) -> tuple[Linear, ...]:
        """Returns matrices that are multiplied with the same input, such as q, k and v.

        Matrices stay separate if they stay quantized or can be used directly from the mapped file.
        Otherwise they must be copied, and are copied into one matrix. For the Triton kernels,
        quantized matrices of one format are also copied into one matrix.
        """
        weights, biases = ([f"{name}.{part}" for name in names] for part in ("weight", "bias"))
        apart = self.matrices(weights) if self.is_mapped(weights[0]) else self.quantized(weights)
        quantized = [part.blocks for part in apart if part.blocks is not None]
        blocks = joined(quantized) if quantized and self._kept_for == "triton" else None
        if apart and blocks is None:
            return tuple(map(self.with_bias, apart, biases))
        weight = self.stacked(weights) if blocks is None else self._without_data(blocks)
        bias = self.stacked(biases) if biases[0] in self else None
        return (Linear(weight, bias, blocks),)

    def is_mapped(self, name: str) -> bool:
        """Returns whether a tensor is used directly from its mapped file, without a copy."""
        stored = self._stored[name]
        if not isinstance(stored, torch.Tensor):
            return False
        return stored.dtype == self._dtype and stored.device == self._device

    def stacked(self, names: Sequence[str]) -> torch.Tensor:
        """Returns one tensor with the rows of several tensors, one after the other."""
        shapes = [self._stored[name].shape for name in names]
        sizes = [shape[0] for shape in shapes]
        shape = (sum(sizes), *shapes[0][1:])
        stacked = torch.empty(shape, dtype=self._dtype, device=self._device)
        for rows, name in zip(torch.split(stacked, sizes), names, strict=True):
            rows.copy_(self.dense(name))
            self._drop(name)
        return stacked

    def _without_data(self, blocks: Quantized) -> torch.Tensor:
        """Returns the field `weight` of a quantized matrix."""
        return torch.empty(blocks.shape, dtype=self._dtype, device="meta")

    def _kept(self, name: str) -> Quantized | None:
        stored = self._stored[name]
        if isinstance(stored, torch.Tensor) or not self._kept_for:
            return None
        return self._native(name, stored) if self._kept_for == "native" else self._moved(stored)

    def _moved(self, stored: GgufBlocks | Coded | Mxfp4) -> Quantized | None:
        """Returns a quantized matrix in a format that the torch and Triton kernels read, moved to
        the device. Returns None if there is no such format for the matrix."""
        quantized: Quantized | None
        if isinstance(stored, Coded):
            quantized = stored.packed()
        elif isinstance(stored, Mxfp4):
            quantized = stored.blocks()
        else:
            quantized = stored if can_widen(stored.type) else None
        if quantized is None:
            return None
        if self._kept_for == "triton" and len(stored.shape) == 2:
            if isinstance(quantized, GgufBlocks):
                quantized = PackedGroups.of_blocks(quantized)
            elif isinstance(quantized, Fp8):
                quantized = replace(quantized, scales=by_columns(quantized.scales))
        moved = quantized.to(self._device)
        parts = (stored.data,) if isinstance(stored, GgufBlocks) else stored.parts
        if all(moved.data.data_ptr() != part.data_ptr() for part in parts):
            for part in parts:
                self._pages.drop(part)
            release_freed_memory()
        return moved

    def _native(self, name: str, stored: GgufBlocks | Coded | Mxfp4) -> GgufBlocks | Fp8 | None:
        """Returns a quantized matrix in a format that the native kernels multiply. Returns None if
        the matrix cannot be converted to such a format without changing its weights."""
        if isinstance(stored, GgufBlocks):
            return stored if is_packed(stored.type) else None
        blocks = stored.blocks()
        if blocks is None:
            self._warn_converted(name)
            return None
        if isinstance(blocks, Fp8):
            return blocks
        self._drop(name)
        release_freed_memory()
        return blocks if is_packed(blocks.type) else None

    def _warn_converted(self, name: str) -> None:
        if not self._has_warned:
            log.warning(
                "%s and similar tensors are converted to %s and take more memory, because the "
                "tensors cannot be repacked exactly for the native kernels "
                "(docs/adding_a_model.md)",
                name,
                self._dtype,
            )
        self._has_warned = True

    def _drop(self, name: str) -> None:
        stored = self._stored[name]
        if isinstance(stored, torch.Tensor):
            self._pages.drop(stored)
        elif isinstance(stored, GgufBlocks):
            self._pages.drop(stored.data)
        else:
            for part in stored.parts:
                self._pages.drop(part)

"""The tensors of a checkpoint in the compute dtype and on the device of a decoder."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from tandem.engine.executor.weights.checkpoint import Stored
from tandem.engine.executor.weights.decoder_weights import Linear, Quantized
from tandem.engine.executor.weights.mxfp4 import (
    Mxfp4,
)
from tandem.engine.executor.weights.released_memory import FilePages, give_back_freed
from tandem.models.checkpoint.quantized.fp8 import Fp8
from tandem.models.checkpoint.quantized.packed_groups import PackedGroups
from tandem.models.checkpoint.quantized.tensors import Coded
from tandem.models.gguf.tensors import Blocks, can_widen, is_packed

# The kernels for which matrices stay quantized; "": they become numbers.
KeptFor = Literal["", "native", "torch", "triton"]

log = logging.getLogger(__name__)


class TensorsByName:
    """Brings tensors, and matrices that may stay quantized, into the form that decoders read."""

    def __init__(
        self,
        stored: Stored,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kept_for: KeptFor,
        pages: FilePages,
    ) -> None:
        """`pages` of tensors that were converted are dropped."""
        self._stored = stored
        self._kept_for = kept_for
        self._pages = pages
        self._dtype = dtype
        self._device = device
        self._has_said = False  # that a matrix was converted

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def tensor(self, name: str) -> torch.Tensor:
        stored = self.dense(name)
        tensor = stored.to(device=self._device, dtype=self._dtype)
        if tensor is not stored:
            self._drop(name)
        return tensor

    def floats(self, name: str) -> torch.Tensor:
        return self.dense(name).to(device=self._device, dtype=torch.float32)

    def dense(self, name: str) -> torch.Tensor:
        """Returns the numbers, in any type."""
        stored = self._stored[name]
        return stored if isinstance(stored, torch.Tensor) else stored.numbers()

    def matrix(self, name: str) -> Linear:
        """Returns a matrix, or those of all experts, without biases; quantized if kept so."""
        return self.alike([name])[0]

    def alike(self, names: Sequence[str]) -> list[Linear]:
        """Returns matrices without biases, all of them quantized or none."""
        return self.quantized(names) or [Linear(self.tensor(name), None) for name in names]

    def quantized(self, names: Sequence[str]) -> list[Linear]:
        """Returns matrices as blocks without biases; an empty list if one does not stay so, or if
        they are of fp8 and of integers, which the native kernels do not multiply as one."""
        found = []
        for name in names:
            blocks = self._kept(name)
            if blocks is None:
                return []
            weight = torch.empty(blocks.shape, dtype=self._dtype, device="meta")
            found.append(Linear(weight, None, blocks))
        is_mixed = len({isinstance(each.blocks, Fp8) for each in found}) > 1
        return [] if is_mixed and self._kept_for == "native" else found

    def linear(self, name: str) -> Linear:
        """Returns a matrix with its bias, if there is one."""
        return self.with_bias(self.matrix(f"{name}.weight"), f"{name}.bias")

    def with_bias(self, matrix: Linear, name: str) -> Linear:
        """Returns the same with the bias of this name, if there is one."""
        return replace(matrix, bias=self.tensor(name)) if name in self else matrix

    def joined(self, *names: str) -> tuple[Linear, ...]:
        """Returns one matrix for products of the same input, where it costs no copy that is not
        made anyway: mapped tensors stay apart, and so do quantized ones."""
        weights, biases = ([f"{name}.{part}" for name in names] for part in ("weight", "bias"))
        apart = self.alike(weights) if self.is_mapped(weights[0]) else self.quantized(weights)
        if apart:
            return tuple(map(self.with_bias, apart, biases))
        return (Linear(self.stacked(weights), self.stacked(biases) if biases[0] in self else None),)

    def is_mapped(self, name: str) -> bool:
        """Returns whether a tensor is used as it lies in its file."""
        stored = self._stored[name]
        if not isinstance(stored, torch.Tensor):
            return False
        return stored.dtype == self._dtype and stored.device == self._device

    def stacked(self, names: Sequence[str]) -> torch.Tensor:
        """Returns the rows of some tensors, one below the other."""
        shapes = [self._stored[name].shape for name in names]
        sizes = [shape[0] for shape in shapes]
        shape = (sum(sizes), *shapes[0][1:])
        stacked = torch.empty(shape, dtype=self._dtype, device=self._device)
        for rows, name in zip(torch.split(stacked, sizes), names, strict=True):
            rows.copy_(self.dense(name))
            self._drop(name)
        return stacked

    def _kept(self, name: str) -> Quantized | None:
        stored = self._stored[name]
        if isinstance(stored, torch.Tensor) or not self._kept_for:
            return None
        return self._native(name, stored) if self._kept_for == "native" else self._moved(stored)

    def _moved(self, stored: Blocks | Coded | Mxfp4) -> Quantized | None:
        """Returns a matrix on the device, exactly, for kernels that expand it."""
        if isinstance(stored, Blocks) and not can_widen(stored.type):
            return None
        quantized: Quantized
        if isinstance(stored, Coded):
            quantized = stored.packed()
        else:
            quantized = stored if isinstance(stored, Blocks) else stored.blocks()
            if self._kept_for == "triton" and len(stored.shape) == 2:
                quantized = PackedGroups.of_blocks(quantized) or quantized
        moved = quantized.to(self._device)
        parts = (stored.data,) if isinstance(stored, Blocks) else stored.parts
        if all(moved.data.data_ptr() != part.data_ptr() for part in parts):
            for part in parts:
                self._pages.drop(part)
            give_back_freed()
        return moved

    def _native(self, name: str, stored: Blocks | Coded | Mxfp4) -> Blocks | Fp8 | None:
        """Returns blocks that native kernels multiply with."""
        if isinstance(stored, Blocks):
            return stored if is_packed(stored.type) else None
        blocks = stored.blocks()
        if blocks is None:
            self._say_converted(name)
            return None
        if isinstance(blocks, Fp8):
            return blocks
        self._drop(name)
        give_back_freed()
        return blocks if is_packed(blocks.type) else None

    def _say_converted(self, name: str) -> None:
        if not self._has_said:
            log.warning(
                "%s, and what follows of its kind, becomes numbers of %s: it cannot be repacked "
                "without a change (docs/adding_a_model.md)",
                name,
                self._dtype,
            )
        self._has_said = True

    def _drop(self, name: str) -> None:
        stored = self._stored[name]
        if isinstance(stored, torch.Tensor):
            self._pages.drop(stored)
        elif isinstance(stored, Blocks):
            self._pages.drop(stored.data)
        else:
            for part in stored.parts:
                self._pages.drop(part)

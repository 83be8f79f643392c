"""The tensors of a checkpoint in the compute dtype and on the device of a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import gguf
import torch

from tandem.engine.executor.checkpoint import Stored
from tandem.engine.executor.file_pages import FilePages
from tandem.engine.executor.mxfp4 import Mxfp4
from tandem.engine.executor.weights import Linear
from tandem.models.gguf.tensors import Blocks, is_packed


class TensorsByName:
    """Brings tensors, and matrices that may stay quantized, into the form that decoders read."""

    def __init__(
        self,
        stored: Stored,
        *,
        dtype: torch.dtype,
        device: torch.device,
        keeps_blocks: bool,
        pages: FilePages,
    ) -> None:
        """`pages` of tensors that were converted are dropped."""
        self._stored = stored
        self._keeps_blocks = keeps_blocks
        self._pages = pages
        self._dtype = dtype
        self._device = device

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
        blocks = self._kept(name) if self._keeps_blocks else None
        if blocks is None:
            return Linear(self.tensor(name), None)
        return Linear(torch.empty(blocks.shape, dtype=self._dtype, device="meta"), None, blocks)

    def alike(self, *names: str) -> list[Linear]:
        """Returns matrices, all of them quantized or none."""
        found = [self.matrix(name) for name in names]
        if all(each.blocks for each in found):
            return found
        return [
            Linear(self.tensor(name), None) if each.blocks else each
            for name, each in zip(names, found, strict=True)
        ]

    def linear(self, name: str) -> Linear:
        """Returns a matrix with its bias, if there is one."""
        bias = f"{name}.bias"
        return replace(
            self.matrix(f"{name}.weight"), bias=self.tensor(bias) if bias in self else None
        )

    def joined(self, *names: str) -> tuple[Linear, ...]:
        """Returns one matrix for products of the same input, where it costs no copy that is not
        made anyway: mapped tensors stay apart."""
        if self._keeps_blocks:
            linears = tuple(self.linear(name) for name in names)
            if all(linear.blocks for linear in linears):
                return linears
        if self.is_mapped(f"{names[0]}.weight"):
            return tuple(self.linear(name) for name in names)
        has_bias = f"{names[0]}.bias" in self
        return (
            Linear(
                self.stacked([f"{name}.weight" for name in names]),
                self.stacked([f"{name}.bias" for name in names]) if has_bias else None,
            ),
        )

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

    def _kept(self, name: str) -> Blocks | None:
        """Returns blocks that native kernels multiply with."""
        stored = self._stored[name]
        if isinstance(stored, Blocks):
            return stored if is_packed(stored.type) else None
        if not isinstance(stored, Mxfp4) or not is_packed(gguf.GGMLQuantizationType.MXFP4):
            return None
        blocks = stored.blocks()
        self._drop(name)
        return blocks

    def _drop(self, name: str) -> None:
        stored = self._stored[name]
        if isinstance(stored, torch.Tensor):
            self._pages.drop(stored)
        elif isinstance(stored, Blocks):
            self._pages.drop(stored.data)
        else:
            for part in stored.parts:
                self._pages.drop(part)

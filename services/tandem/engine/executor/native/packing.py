"""Packs weights in the order in which the native kernels read them (native/decoder.h,
quantized.h)."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from tandem.engine.cache.layout.pool_memory import own_pages
from tandem.engine.executor.weights.decoder_weights import (
    LATENT_NORM_EPS,
    LatentWeights,
    Linear,
    ModelWeights,
)
from tandem.engine.executor.weights.released_memory import FilePages, release_freed_memory
from tandem.models.checkpoint.quantized.fp8 import Fp8
from tandem.models.config.latent import Latent as LatentSizes
from tandem.models.gguf.tensors import GgufBlocks
from tandem_kernels.native.library import (
    PANEL,
    Kind,
    Latent,
    Library,
    Matrix,
    address,
    packed_bytes,
    whole_steps,
)

KINDS = {torch.float32: Kind.F32, torch.bfloat16: Kind.BF16}
FP8_KINDS = {torch.float32: Kind.F8_F32, torch.bfloat16: Kind.F8_BF16}
_MAPPED_AT_ONCE = 64 << 20
_LINE = 64  # bytes of a cache line


class HugePages:
    """Memory in huge pages for packed matrices, one matrix after the other. Deleting this object
    frees the memory."""

    def __init__(self) -> None:
        self._mapped: list[npt.NDArray[np.uint8]] = []
        self._free = np.empty(0, np.uint8)

    def zeros(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Allocates `num_bytes` bytes that are zero and aligned to a cache line."""
        size = -(-num_bytes // _LINE) * _LINE
        if size > len(self._free):
            self._free = np.frombuffer(own_pages(max(size, _MAPPED_AT_ONCE)), np.uint8)
            self._mapped.append(self._free)
        zeros = self._free[:num_bytes]
        self._free = self._free[size:]
        return zeros


class Packer:
    """Creates packed matrices and owns their memory, which is freed with the packer."""

    def __init__(
        self,
        library: Library,
        pages: FilePages,
        *,
        int8: bool = False,
        instructions: str | None = None,
    ) -> None:
        """`pages` has the address ranges at which the checkpoint's files are mapped. After a weight
        is packed, the mapped pages that have the weight are dropped from memory."""
        self._library = library
        self._pages = pages
        self._int8 = int8
        self._instructions = instructions
        self._kept: list[Any] = []  # objects to which C++ has pointers
        self._huge_pages = HugePages()

    def keep(self, struct: object) -> None:
        """Keeps a reference to a struct, because C++ has pointers to the struct."""
        self._kept.append(struct)

    def matrix(self, parts: Sequence[Linear], *, keeps_kind: bool = False) -> Matrix:
        """Packs several matrices, such as q, k and v, as one matrix with all their rows.

        If `keeps_kind` is True, the weights are not converted to int8, even with the setting
        weights=int8.
        """
        if isinstance(parts[0].blocks, Fp8):
            return self._fp8(parts)
        if parts[0].blocks:
            return self._quantized(parts)
        weight = parts[0].weight if len(parts) == 1 else torch.cat([p.weight for p in parts])
        weight = weight.contiguous()
        num_out, num_in = weight.shape
        kind = self._kind(weight, keeps_kind=keeps_kind)
        panels = self._huge_pages.zeros(packed_bytes((num_out, num_in), kind))
        scales = self._library.pack(
            weight.data_ptr(), KINDS[weight.dtype], (num_out, num_in), kind, panels
        )
        self._kept.append(scales)
        self._drop(parts)
        return Matrix(
            panels=address(panels),
            scales=address(scales),
            bias=self._bias(parts),
            num_in=num_in,
            num_out=num_out,
            kind=kind,
        )

    def gate_up(self, parts: Sequence[Linear]) -> Matrix:
        """Packs the gate and up matrices. `parts` has two matrices, or one matrix with the rows of
        both.

        A packed matrix consists of panels of 16 rows. In the formats BF16_PAIRS and F8_PAIRS,
        panels of gate rows and panels of up rows alternate (decoder.h).
        """
        kind = None if isinstance(parts[0].blocks, GgufBlocks) else self._kind_of(parts[0])
        if kind not in (Kind.BF16_PAIRS, Kind.F8_PAIRS):
            return self.matrix(parts)
        biases = [part.bias for part in parts if part.bias is not None]
        bias = _interleave(biases) if biases else None
        blocks = [part.blocks for part in parts if isinstance(part.blocks, Fp8)]
        if blocks:
            data = _interleave([each.data.view(torch.uint8) for each in blocks])
            fp8 = Fp8(
                data.view(blocks[0].data.dtype), _interleave([each.scales for each in blocks])
            )
            weight = torch.empty(data.shape, dtype=parts[0].weight.dtype, device="meta")
            packed = self._fp8((Linear(weight, bias, fp8),), stored=blocks)
        else:
            packed = self.matrix((Linear(_interleave([part.weight for part in parts]), bias),))
        self._drop(parts)
        return packed

    def embedding(self, weights: ModelWeights, output: Matrix) -> dict[str, int | None]:
        """Returns the embedding fields of the struct `Model`.

        If the embedding is tied to the output matrix, and this matrix was not converted to int8,
        the kernels read embeddings from the packed output matrix.
        """
        tied = weights.embedding_blocks is weights.output_blocks
        if tied and weights.embedding is weights.output and not self._int8:
            return {"embedding": None, "embedding_kind": output.kind}
        if weights.embedding_blocks is not None:
            linear = Linear(weights.embedding, None, weights.embedding_blocks)
            panels = self._quantized([linear])
            return {"embedding": panels.panels, "embedding_kind": panels.kind}
        embedding = weights.embedding.contiguous()
        self._kept.append(embedding)
        return {"embedding": embedding.data_ptr(), "embedding_kind": KINDS[embedding.dtype]}

    def latent(self, sizes: LatentSizes, weights: LatentWeights) -> Latent:
        """Packs the weights of latent attention."""
        latent = Latent(
            q_norm=self.floats(weights.q_norm),
            kv_norm=self.floats(weights.kv_norm),
            keys=self._of_heads(weights.keys),
            values=self._of_heads(weights.values),
            kv_rank=sizes.kv_rank,
            rope=sizes.rope_dim,
            plain=sizes.plain_dim,
            value=sizes.value_dim,
            norm_eps=LATENT_NORM_EPS,
        )
        if weights.q_out is not None:
            latent.q_out = self.matrix((Linear(weights.q_out, None),))
        self.keep(latent)
        return latent

    def floats(self, tensor: torch.Tensor | None) -> int | None:
        """Copies a tensor to float32 and returns the address of the copy. Returns None if `tensor`
        is None."""
        if tensor is None:
            return None
        floats = tensor.to(torch.float32, copy=True).contiguous()
        self._kept.append(floats)
        return floats.data_ptr()

    def _of_heads(self, weights: torch.Tensor) -> object:
        """Packs matrices [heads, out, in], one per head. The matrices are not converted to int8,
        because a single thread multiplies each matrix."""
        matrices = [self.matrix((Linear(each, None),), keeps_kind=True) for each in weights]
        packed = (Matrix * len(matrices))(*matrices)
        self.keep(packed)
        return packed

    def _fp8(self, parts: Sequence[Linear], stored: Sequence[Fp8] = ()) -> Matrix:
        """Packs several fp8 matrices as one matrix. If the caller interleaved rows to make `parts`,
        `stored` has the checkpoint's own matrices. The error for a NaN weight then names the
        checkpoint's tensor."""
        blocks = [part.blocks for part in parts if isinstance(part.blocks, Fp8)]
        data = [each.data.view(torch.uint8) for each in blocks]
        codes = (data[0] if len(data) == 1 else torch.cat(data)).contiguous()
        num_out, num_in = codes.shape
        kind = self._kind_of(parts[0])
        panels = self._huge_pages.zeros(packed_bytes((num_out, num_in), kind))
        if not self._library.pack_fp8(codes.data_ptr(), (num_out, num_in), kind, panels):
            for each in stored or blocks:
                each.check_numbers()
            raise AssertionError(
                "the native kernels reported a NaN in fp8 weights, but all weights are numbers"
            )
        scales = pad(torch.cat([each.scales for each in blocks]), (0, 0, 0, -num_out % PANEL))
        scales = scales.view(-1, PANEL, scales.shape[1]).transpose(1, 2).contiguous()
        self._kept.append(scales)
        self._drop(parts)
        return Matrix(
            panels=address(panels),
            scales=scales.data_ptr(),
            bias=self._bias(parts),
            num_in=num_in,
            num_out=num_out,
            kind=kind,
            scale_inputs=whole_steps(blocks[0].scale_inputs),
        )

    def _quantized(self, parts: Sequence[Linear]) -> Matrix:
        """Packs several quantized matrices. Consecutive matrices with the same format and the same
        order of inputs become one packed matrix. For example, if q and k are Q4_K and v is Q6_K,
        the result is a packed matrix of q and k, whose field `rest` points to a packed matrix of
        v."""
        matrix = None
        alike = [list(run) for _, run in groupby(parts, self._form_of_blocks)]
        for run in reversed(alike):
            matrix = self._of_one_kind(run, rest=matrix)
        assert matrix is not None
        return matrix

    def _of_one_kind(self, parts: Sequence[Linear], *, rest: Matrix | None) -> Matrix:
        num_out = sum(len(part.weight) for part in parts)
        num_in = parts[0].weight.shape[1]
        kind, _ = self._form_of_blocks(parts[0])
        panels = self._huge_pages.zeros(self._library.quantized_bytes((num_out, num_in), kind))
        first_output = 0
        for part in parts:
            assert isinstance(part.blocks, GgufBlocks)
            rows = part.blocks.rows()
            self._library.pack_blocks(
                rows.data_ptr(), part.blocks.type, (len(rows), num_in), first_output, panels
            )
            first_output += len(rows)
        self._drop(parts)
        order = parts[0].blocks.order if isinstance(parts[0].blocks, GgufBlocks) else None
        self._kept += [rest, order]
        return Matrix(
            panels=address(panels),
            bias=self._bias(parts),
            num_in=num_in,
            num_out=num_out,
            kind=kind,
            rest=addressof(rest) if rest else None,
            order=None if order is None else order.data_ptr(),
        )

    def _kind_of(self, part: Linear) -> Kind:
        if part.blocks is None:
            return self._kind(part.weight)
        return self._library.packed_kind(FP8_KINDS[part.weight.dtype], self._instructions)

    def _kind(self, weight: torch.Tensor, *, keeps_kind: bool = False) -> Kind:
        kind = Kind.I8 if self._int8 and not keeps_kind else KINDS[weight.dtype]
        return self._library.packed_kind(kind, self._instructions)

    def _form_of_blocks(self, part: Linear) -> tuple[Kind, bytes]:
        """Returns the format in which a quantized matrix is packed, and the order of the matrix's
        inputs as bytes. The bytes are empty if the inputs are in their normal order."""
        assert isinstance(part.blocks, GgufBlocks)
        kind = self._library.kind_of_blocks(part.blocks.type)
        assert kind is not None
        order = part.blocks.order
        return kind, b"" if order is None else order.numpy().tobytes()

    def _bias(self, parts: Sequence[Linear]) -> int | None:
        """Joins the biases of matrices that are packed as one matrix, with zeros for a matrix
        without a bias. Returns the address of the joined biases, or None if no matrix has a
        bias."""
        if all(part.bias is None for part in parts):
            return None
        biases = (
            torch.zeros(len(part.weight)) if part.bias is None else part.bias for part in parts
        )
        return self.floats(torch.cat([bias.float() for bias in biases]))

    def _drop(self, parts: Sequence[Linear]) -> None:
        for part in parts:
            self._pages.drop(part.blocks.data if part.blocks else part.weight)
        release_freed_memory()


def _interleave(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the rows of gates and ups in alternating panels: 16 rows of gates, 16 rows of ups,
    and so on. `parts` has two tensors, or one tensor with the rows of both. The last panels are
    padded with zeros."""
    tensors = parts if len(parts) == 2 else parts[0].chunk(2)
    rest = -len(tensors[0]) % PANEL
    if rest:
        tensors = [torch.cat([each, each.new_zeros(rest, *each.shape[1:])]) for each in tensors]
    panels = [each.view(-1, PANEL, *each.shape[1:]) for each in tensors]
    return torch.stack(panels, 1).flatten(0, 2)

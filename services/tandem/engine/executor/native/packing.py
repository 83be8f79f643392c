"""Packs weights in the order in which the native kernels read them (native/decoder.h,
quantized.h)."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_int32, c_void_p
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from tandem.engine.cache.layout.kv_groups import LayerPlace
from tandem.engine.cache.layout.pool_memory import own_pages
from tandem.engine.executor.weights.decoder_weights import (
    INDEX_NORM_EPS,
    LATENT_NORM_EPS,
    CompressorWeights,
    IndexerWeights,
    LatentWeights,
    Linear,
    ModelWeights,
    SharedKvWeights,
    StreamWeights,
)
from tandem.engine.executor.weights.released_memory import FilePages, release_freed_memory
from tandem.engine.executor.weights.share import WHOLE, Share
from tandem.models.checkpoint.quantized.fp8 import Fp8
from tandem.models.config.compressor import Compressor as CompressorSizes
from tandem.models.config.deepseek_v4 import SharedKv as SharedKvSizes
from tandem.models.config.indexer import Indexer as IndexerSizes
from tandem.models.config.latent import Latent as LatentSizes
from tandem.models.gguf.tensors import GgufBlocks
from tandem_kernels.native.library import (
    ENTRY_KINDS,
    PANEL,
    Compressor,
    Indexer,
    Kind,
    Latent,
    Library,
    Matrix,
    SharedKv,
    StreamMixture,
    address,
    packed_bytes,
    whole_steps,
)

KINDS = {torch.float32: Kind.F32, torch.bfloat16: Kind.BF16}
FP8_KINDS = {torch.float32: Kind.F8_F32, torch.bfloat16: Kind.F8_BF16}
_MAPPED_AT_ONCE = 64 << 20
_LINE = 64  # bytes of a cache line


class Panels(NamedTuple):
    """Consecutive panels of a packed matrix. A panel has 16 outputs."""

    first: int
    num: int

    def rows(self, num_out: int) -> slice:
        """Returns the outputs of these panels in a matrix with `num_out` outputs. The last panel
        may have fewer than 16."""
        return slice(*(min(at * PANEL, num_out) for at in (self.first, self.first + self.num)))


def panels_of(share: Share, num_out: int) -> Panels:
    """Returns what one rank of a tensor-parallel engine stores of a matrix: the panels that its own
    threads multiply (native/team.h)."""
    own = share.of(-(-num_out // PANEL))
    return Panels(own.start, len(own))


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
        share: Share = WHOLE,
        int8: bool = False,
        instructions: str | None = None,
    ) -> None:
        """`pages` has the address ranges at which the checkpoint's files are mapped. After a weight
        is packed, the mapped pages that have the weight are dropped from memory."""
        self._library = library
        self._pages = pages
        self._share = share
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
            assert all(isinstance(part.blocks, Fp8) for part in parts)
            return self._fp8(parts)
        if parts[0].blocks:
            return self._quantized(parts, self._share)
        num_out = sum(len(part.weight) for part in parts)
        panels = panels_of(self._share, num_out)
        rows = _rows([part.weight for part in parts], panels.rows(num_out))
        kind = self._kind(rows, keeps_kind=keeps_kind)
        matrix = self._dense(rows, panels, kind, num_out=num_out)
        matrix.bias = self._bias(parts)
        self._drop(parts)
        return matrix

    def gate_up(self, parts: Sequence[Linear]) -> Matrix:
        """Packs the gate and up matrices. `parts` has two matrices, or one matrix with the rows of
        both.

        A packed matrix consists of panels of 16 rows. In the formats BF16_PAIRS and F8_PAIRS,
        panels of gate rows and panels of up rows alternate (decoder.h).
        """
        kind = None if isinstance(parts[0].blocks, GgufBlocks) else self._kind_of(parts[0])
        if kind not in (Kind.BF16_PAIRS, Kind.F8_PAIRS):
            return self.matrix(parts)
        num_inner = sum(len(part.weight) for part in parts) // 2
        num_pairs = -(-num_inner // PANEL)
        pairs = panels_of(self._share, num_inner)
        panels = Panels(2 * pairs.first, 2 * pairs.num)
        num_out = 2 * num_pairs * PANEL
        blocks = [part.blocks for part in parts if isinstance(part.blocks, Fp8)]
        if blocks:
            codes = [each.data.view(torch.uint8) for each in blocks]
            scales = _interleave(_gate_and_up([each.scales for each in blocks]))
            packed = self._fp8_rows(
                _interleaved_rows(codes, pairs.rows(num_inner)),
                panels,
                scales,
                kind,
                scale_inputs=blocks[0].scale_inputs,
                stored=blocks,
            )
        else:
            rows = _interleaved_rows([part.weight for part in parts], pairs.rows(num_inner))
            packed = self._dense(rows, panels, kind, num_out=num_out)
        biases = [part.bias for part in parts if part.bias is not None]
        packed.bias = self.floats(_interleave(_gate_and_up(biases)) if biases else None)
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
            # Each rank has the whole embedding, because any token may come next.
            linear = Linear(weights.embedding, None, weights.embedding_blocks)
            panels = self._quantized([linear], WHOLE)
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

    def indexer(
        self, sizes: IndexerSizes, weights: IndexerWeights, *, place: int, norm_eps: float
    ) -> Indexer:
        """Packs the weights of an indexer, the one with the number `place` among the indexers of
        all layers. The matrices are not converted to int8, because the choice of keys depends on
        small differences of scores. `norm_eps` is that of the model."""
        indexer = Indexer(
            queries=self._index_queries(sizes, weights.queries),
            keys=self.matrix((Linear(weights.keys, None),), keeps_kind=True),
            query_norm=self.floats(weights.query_norm),
            key_norm=self.floats(weights.key_norm),
            key_bias=self.floats(weights.key_norm_bias),
            num_heads=sizes.num_heads,
            dim=sizes.dim,
            rope=sizes.rope_dim,
            top_k=sizes.top_k,
            choice_size=sizes.block_size or 1,
            num_local=sizes.num_local,
            place=place,
            rate=1,
            key_norm_eps=norm_eps if weights.key_norm_bias is None else INDEX_NORM_EPS,
        )
        if weights.head_weights is not None:
            indexer.head_weights = self.matrix(
                (Linear(weights.head_weights, None),), keeps_kind=True
            )
        self.keep(indexer)
        return indexer

    def entry_indexer(self, sizes: IndexerSizes, weights: CompressorWeights, rate: int) -> Indexer:
        """Packs the weights of an indexer that chooses entries of `rate` tokens each. A compressor
        makes its keys."""
        assert weights.queries is not None
        assert weights.head_weights is not None
        indexer = Indexer(
            queries=self._index_queries(sizes, weights.queries),
            head_weights=self.matrix((Linear(weights.head_weights, None),), keeps_kind=True),
            num_heads=sizes.num_heads,
            dim=sizes.dim,
            rope=sizes.rope_dim,
            top_k=sizes.top_k,
            choice_size=1,
            rate=rate,
        )
        self.keep(indexer)
        return indexer

    def _index_queries(self, sizes: IndexerSizes, queries: torch.Tensor) -> Matrix:
        # The kernels read queries whose sizes are multiples of 16.
        padded = pad(queries.view(sizes.num_heads, sizes.dim, -1), (0, 0, 0, -sizes.dim % PANEL))
        return self.matrix((Linear(padded.flatten(0, 1), None),), keeps_kind=True)

    def shared_kv(self, sizes: SharedKvSizes, weights: SharedKvWeights) -> SharedKv:
        """Packs the weights of attention whose keys are its values."""
        shared = SharedKv(
            q_norm=self.floats(weights.q_norm),
            kv_norm=self.floats(weights.kv_norm),
            q_out=self.matrix((weights.q_out,)),
            out_groups=self._of_heads(weights.out_groups),
            num_groups=sizes.num_groups,
            rope=sizes.rope_dim,
        )
        self.keep(shared)
        return shared

    def compressor(
        self,
        sizes: CompressorSizes,
        weights: CompressorWeights,
        *,
        entries: LayerPlace,
        inputs: LayerPlace,
    ) -> Compressor:
        """Packs the weights of a compressor. The places are those of a layer's entries and of the
        inputs of its entries. The matrices are not converted to int8, because entries are kept
        longer than other keys."""
        bias = (self.floats(part.bias) for part in weights.parts)
        norm = (self.floats(part.norm) for part in weights.parts)
        compressor = Compressor(
            inputs=self.matrix(weights.inputs, keeps_kind=True),
            bias=(c_void_p * ENTRY_KINDS)(*bias),
            norm=(c_void_p * ENTRY_KINDS)(*norm),
            dims=(c_int32 * ENTRY_KINDS)(*sizes.dims),
            rate=sizes.rate,
            has_overlap=sizes.num_seen > sizes.rate,
            entry_group=entries.group,
            entry_part=entries.number,
            input_group=inputs.group,
            input_part=inputs.number,
        )
        self.keep(compressor)
        return compressor

    def mixture(self, weights: StreamWeights) -> StreamMixture:
        """Packs the weights that mix residual streams."""
        return StreamMixture(
            matrix=self.matrix((Linear(weights.matrix, None),), keeps_kind=True),
            base=self.floats(weights.base),
            scale=self.floats(weights.scale),
        )

    def matrices(self, linears: Sequence[Linear]) -> Any:
        """Packs each of several matrices, and returns an array of them."""
        packed = (Matrix * len(linears))(*(self.matrix((each,)) for each in linears))
        self.keep(packed)
        return packed

    def floats(self, tensor: torch.Tensor | None) -> int | None:
        """Copies a tensor to float32 and returns the address of the copy. Returns None if `tensor`
        is None."""
        if tensor is None:
            return None
        floats = tensor.to(torch.float32, copy=True).contiguous()
        self._kept.append(floats)
        return floats.data_ptr()

    def _of_heads(self, weights: torch.Tensor) -> object:
        """Packs matrices [heads, out, in], one per head. A rank stores only the matrices of its own
        heads. The matrices are not converted to int8, because a single thread multiplies each
        matrix."""
        own = self._share.of(len(weights))
        num_out = weights.shape[1]
        matrices = []
        for head, each in enumerate(weights):
            panels = panels_of(WHOLE, num_out) if head in own else Panels(0, 0)
            kind = self._kind(each, keeps_kind=True)
            matrices.append(self._dense(each[panels.rows(num_out)], panels, kind, num_out=num_out))
        packed = (Matrix * len(matrices))(*matrices)
        self.keep(packed)
        return packed

    def _dense(self, rows: torch.Tensor, panels: Panels, kind: Kind, *, num_out: int) -> Matrix:
        """Packs the rows of `panels` of a matrix with `num_out` rows, without a bias."""
        rows = rows.contiguous()
        num_rows, num_in = rows.shape
        memory = self._huge_pages.zeros(packed_bytes((num_rows, num_in), kind))
        scales = None
        if num_rows:
            found = self._library.pack(
                rows.data_ptr(), KINDS[rows.dtype], (num_rows, num_in), kind, memory
            )
            if found is not None:  # the kernels find scales by the number of the output
                scales = np.zeros(num_out, np.float32)
                scales[panels.first * PANEL :][:num_rows] = found
        self._kept.append(scales)
        return Matrix(
            panels=address(memory),
            scales=address(scales),
            first_panel=panels.first,
            num_panels=panels.num,
            num_in=num_in,
            num_out=num_out,
            kind=kind,
        )

    def _fp8(self, parts: Sequence[Linear]) -> Matrix:
        """Packs several fp8 matrices as one matrix."""
        blocks = [part.blocks for part in parts if isinstance(part.blocks, Fp8)]
        num_out = sum(len(each.data) for each in blocks)
        panels = panels_of(self._share, num_out)
        packed = self._fp8_rows(
            _rows([each.data.view(torch.uint8) for each in blocks], panels.rows(num_out)),
            panels,
            torch.cat([each.scales for each in blocks]),
            self._kind_of(parts[0]),
            scale_inputs=blocks[0].scale_inputs,
            stored=blocks,
        )
        packed.bias = self._bias(parts)
        self._drop(parts)
        return packed

    def _fp8_rows(
        self,
        codes: torch.Tensor,
        panels: Panels,
        scales: torch.Tensor,
        kind: Kind,
        *,
        scale_inputs: int,
        stored: Sequence[Fp8],
    ) -> Matrix:
        """Packs fp8 codes, uint8 [rows, in], which are the rows of `panels`, without a bias.
        `scales` are those of all rows of the matrix, [out, runs]. `stored` has the checkpoint's
        matrices, so that an error about a weight that is NaN can name the checkpoint's tensor."""
        codes = codes.contiguous()
        memory = self._huge_pages.zeros(packed_bytes((len(codes), codes.shape[1]), kind))
        size = (len(codes), codes.shape[1])
        if len(codes) and not self._library.pack_fp8(codes.data_ptr(), size, kind, memory):
            for each in stored:
                each.check_numbers()
            raise AssertionError(
                "the native kernels found a NaN in fp8 weights, but Python found none"
            )
        num_out = len(scales)
        scales = pad(scales, (0, 0, 0, -num_out % PANEL))
        scales = scales.view(-1, PANEL, scales.shape[1]).transpose(1, 2).contiguous()
        self._kept.append(scales)
        return Matrix(
            panels=address(memory),
            scales=scales.data_ptr(),
            first_panel=panels.first,
            num_panels=panels.num,
            num_in=codes.shape[1],
            num_out=num_out,
            kind=kind,
            scale_inputs=whole_steps(scale_inputs),
        )

    def _quantized(self, parts: Sequence[Linear], share: Share) -> Matrix:
        """Packs several quantized matrices. Consecutive matrices with the same format and the same
        order of inputs become one packed matrix. For example, if q and k are Q4_K and v is Q6_K,
        the result is a packed matrix of q and k, whose field `rest` points to a packed matrix of
        v. Matrices after the first may be unquantized. A rank stores the panels of its `share` of
        each packed matrix."""
        matrix = None
        alike = [list(run) for _, run in groupby(parts, self._form_of_blocks)]
        for run in reversed(alike):
            if run[0].blocks is None:
                matrix = self._dense_rest(run, share, rest=matrix)
            else:
                matrix = self._of_one_kind(run, share, rest=matrix)
        assert matrix is not None
        return matrix

    def _of_one_kind(self, parts: Sequence[Linear], share: Share, *, rest: Matrix | None) -> Matrix:
        num_out = sum(len(part.weight) for part in parts)
        num_in = parts[0].weight.shape[1]
        kind, _ = self._form_of_blocks(parts[0])
        panels = panels_of(share, num_out)
        own = panels.rows(num_out)
        size = (panels.num * PANEL, num_in)
        memory = self._huge_pages.zeros(self._library.quantized_bytes(size, kind))
        first_output = 0  # of this part
        for part in parts:
            assert isinstance(part.blocks, GgufBlocks)
            rows = part.blocks.rows()
            first, end = (min(max(at - first_output, 0), len(rows)) for at in (own.start, own.stop))
            if first < end:
                self._library.pack_blocks(
                    rows[first:end].data_ptr(),
                    part.blocks.type,
                    (end - first, num_in),
                    first_output + first - own.start,
                    memory,
                )
            first_output += len(rows)
        self._drop(parts)
        order = parts[0].blocks.order if isinstance(parts[0].blocks, GgufBlocks) else None
        self._kept += [rest, order]
        return Matrix(
            panels=address(memory),
            bias=self._bias(parts),
            first_panel=panels.first,
            num_panels=panels.num,
            num_in=num_in,
            num_out=num_out,
            kind=kind,
            rest=addressof(rest) if rest else None,
            order=None if order is None else order.data_ptr(),
        )

    def _dense_rest(self, parts: Sequence[Linear], share: Share, *, rest: Matrix | None) -> Matrix:
        """Packs unquantized matrices that follow quantized ones. Their inputs are the rows of fp32
        numbers that are quantized for the others, so they are fp32, too."""
        num_out = sum(len(part.weight) for part in parts)
        panels = panels_of(share, num_out)
        rows = _rows([part.weight.float() for part in parts], panels.rows(num_out))
        matrix = self._dense(rows, panels, Kind.F32, num_out=num_out)
        matrix.bias = self._bias(parts)
        matrix.rest = addressof(rest) if rest else None
        self._kept.append(rest)
        self._drop(parts)
        return matrix

    def _kind_of(self, part: Linear) -> Kind:
        if part.blocks is None:
            return self._kind(part.weight)
        return self._library.packed_kind(FP8_KINDS[part.weight.dtype], self._instructions)

    def _kind(self, weight: torch.Tensor, *, keeps_kind: bool = False) -> Kind:
        kind = Kind.I8 if self._int8 and not keeps_kind else KINDS[weight.dtype]
        return self._library.packed_kind(kind, self._instructions)

    def _form_of_blocks(self, part: Linear) -> tuple[Kind, bytes]:
        """Returns the format in which a matrix is packed beside quantized ones, and the order of
        its inputs as bytes. The bytes are empty if the inputs are in their normal order."""
        if part.blocks is None:
            return Kind.F32, b""
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


def _rows(parts: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
    """Returns some rows of a matrix of which `parts` has all rows, one part after the other. Copies
    only rows of several parts."""
    found: list[torch.Tensor] = []
    first = 0  # the first row of the part
    for part in parts:
        found.append(part[max(rows.start - first, 0) : max(rows.stop - first, 0)])
        first += len(part)
    found = [each for each in found if len(each)] or found[:1]
    return found[0] if len(found) == 1 else torch.cat(found)


def _gate_and_up(parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Returns the gates and the ups. `parts` has these two, or one tensor with the rows of both."""
    return parts if len(parts) == 2 else parts[0].chunk(2)


def _interleaved_rows(parts: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
    """Interleaves some rows of the gates with the same rows of the ups. `parts` is as for
    `_gate_and_up`."""
    return _interleave([each[rows] for each in _gate_and_up(parts)])


def _interleave(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the rows of gates and ups in alternating panels: 16 rows of gates, 16 rows of ups,
    and so on. The last panels are padded with zeros."""
    rest = -len(tensors[0]) % PANEL
    if rest:
        tensors = [torch.cat([each, each.new_zeros(rest, *each.shape[1:])]) for each in tensors]
    panels = [each.view(-1, PANEL, *each.shape[1:]) for each in tensors]
    return torch.stack(panels, 1).flatten(0, 2)

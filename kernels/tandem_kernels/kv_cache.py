"""Reads and writes KV blocks in a pool of bytes, with torch.

A block has the KV of `block_size` tokens in all layers. Within a block, the K of one head in one
layer is a *run*: `block_size` rows of D elements, one row per token. Its V is the next run. A pool
is thus a list of runs, in the order block, head, layer, K before V.
If layers have indexers, the keys of the indexers are at the end of each block, in the place of some
runs.

The indices of runs and rows are computed once per step, for layer 0. For another layer, a constant
is added. This module knows block ids and offsets, but no sequences.
"""

import math
from typing import NamedTuple, Protocol

import torch

from tandem_kernels import kv_fp8, kv_int4, kv_int4_keys, kv_int8
from tandem_kernels.kv_fp8 import FixedScales
from tandem_kernels.kv_int4_keys import KeyChannels

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


# Quantization parameters of a model that do not depend on the token.
StaticKv = KeyChannels | FixedScales


class RowFormat(Protocol):
    """The interface of the modules kv_int8.py, kv_fp8.py and kv_int4.py."""

    def quantize(self, rows: torch.Tensor, /) -> tuple[torch.Tensor, torch.Tensor]: ...
    def widen(self, numbers: torch.Tensor, scales: torch.Tensor, /) -> torch.Tensor: ...


# KV dtype -> (module that quantizes K, module that quantizes V).
_FORMATS: dict[str, tuple[RowFormat, RowFormat]] = {
    "int8": (kv_int8, kv_int8),
    "fp8_e4m3": (kv_fp8, kv_fp8),
    "k8v4": (kv_int8, kv_int4),
    "int4": (kv_int4, kv_int4),  # for K, Int4KvPool replaces kv_int4 by kv_int4_keys
}


class RotatedKey(Protocol):
    """The properties of tandem.common.dtypes.RotatedKey that a pool uses."""

    @property
    def dim(self) -> int: ...
    @property
    def dtype(self) -> str: ...


class IndexKeys(Protocol):
    """The properties of tandem.common.dtypes.IndexKeys that a pool uses."""

    @property
    def num_layers(self) -> int: ...
    @property
    def dim(self) -> int: ...


class KvLayout(Protocol):
    """The properties of tandem.engine.cache.layout.block_layout.BlockLayout that a pool uses."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def head_bytes(self) -> int: ...
    @property
    def layer_bytes(self) -> int: ...
    @property
    def row_bytes(self) -> tuple[int, int]: ...
    @property
    def has_values(self) -> bool: ...
    @property
    def rotated(self) -> RotatedKey | None: ...
    @property
    def index(self) -> IndexKeys | None: ...


class LayerKv(NamedTuple):
    """One layer of a pool as strided views, for the Triton kernels. The 2 in shapes is K and V."""

    numbers: torch.Tensor  # [num_blocks, heads, 2, block_size, D]; e4m3 is stored as uint8
    scales: torch.Tensor | None  # [num_blocks, heads, 2, block_size] float16; None: unquantized
    fixed_scales: torch.Tensor | None = None  # [2]: static scales; None: each row has its own


def make_pool(
    memory: torch.Tensor,
    layout: KvLayout,
    static: StaticKv | None = None,
    heads: range | None = None,
) -> "KvPool":
    """Creates a pool in `memory`, uint8 [num_blocks, block_bytes]. The layout and its KV dtype
    determine the class. `static` must be KeyChannels for int4, and may be FixedScales for
    fp8_e4m3. With `heads`, the pool reads and writes only these heads of the blocks; other ranks of
    a tensor-parallel engine have the others."""
    if layout.dtype == "int4":
        assert isinstance(static, KeyChannels)
        return Int4KvPool(memory, layout, static, heads)
    if not layout.has_values:
        kind = LatentKvPool if layout.rotated is None else QuantizedLatentKvPool
        return kind(memory, layout, heads)
    if static is not None:
        assert isinstance(static, FixedScales)
        return FixedScaleKvPool(memory, layout, static, heads)
    return (KvPool if layout.dtype in _DTYPES else QuantizedKvPool)(memory, layout, heads)


class KvPool:
    """A pool with unquantized KV. KV is written by token and read by block."""

    static: StaticKv | None = None

    def __init__(self, memory: torch.Tensor, layout: KvLayout, heads: range | None = None) -> None:
        """`heads` are the consecutive heads of a block that this pool reads and writes; by default
        all."""
        assert memory.dtype == torch.uint8
        assert memory.shape == (layout.num_blocks, layout.block_bytes)
        self.memory = memory
        self.layout = layout
        heads = range(layout.num_kv_heads) if heads is None else heads
        self.num_kv_heads, self.num_layers = len(heads), layout.num_layers
        self.block_size, self.head_dim = layout.block_size, layout.head_dim
        self.device = memory.device
        self._heads = torch.arange(heads.start, heads.stop, device=memory.device)
        self._own = slice(heads.start, heads.stop)
        # Number of runs in a block. Index keys take the place of whole parts.
        num_parts = layout.block_bytes // layout.layer_bytes
        self._block_runs = num_parts * (1 + layout.has_values)
        self._make_views()

    def _make_views(self) -> None:
        self.dtype = _DTYPES[self.layout.dtype]  # dtype of the result of `gather`
        self._tokens = self.memory.view(self.dtype).view(-1, self.head_dim)
        self._runs = self._tokens.view(-1, self.block_size * self.head_dim)

    @property
    def kv(self) -> torch.Tensor:
        """The pool as [num_blocks, heads, layers, 2, block_size, D], where the 2 is K and V. With
        latent attention, this dimension has size 1."""
        runs = 1 + self.layout.has_values
        shape = self.layout.num_kv_heads, self.num_layers, runs, self.block_size, self.head_dim
        blocks = self._tokens.view(self.layout.num_blocks, -1)
        return blocks[:, : math.prod(shape)].view(-1, *shape)[:, self._own]

    def layer(self, number: int) -> LayerKv:
        return LayerKv(layer_of(self.kv, number), None)

    def token_rows(self, block_ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Returns, for each token and head, the index of the row for the token's K in layer 0:
        [T, heads]. The arguments, both [T], are the id of the token's block and the token's offset
        in this block."""
        return self._first_runs(block_ids) * self.block_size + offsets.unsqueeze(-1)

    def write(
        self, layer: int, token_rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Stores keys and values, each [T, heads, D] of any dtype. `token_rows` is the result of
        the method `token_rows`."""
        rows = token_rows + 2 * layer * self.block_size
        self._tokens.index_put_((rows,), keys.to(self.dtype))
        self._tokens.index_put_((rows + self.block_size,), values.to(self.dtype))

    def block_rows(self, block_tables: torch.Tensor) -> torch.Tensor:
        """Returns the indices of the blocks' runs in layer 0, for `gather`: first all runs of K and
        then all runs of V, [2 * B * heads * M]. A run is the K or V of one head in a block.
        `block_tables` is [B, M], the ids of M blocks for each of B sequences."""
        runs = self._first_runs(block_tables).transpose(1, 2)
        return torch.stack((runs, runs + 1)).flatten()

    def gather(self, layer: int, block_rows: torch.Tensor, num_seqs: int) -> torch.Tensor:
        """Copies the K and V of blocks to one tensor [2, B, heads, M * block_size, D]. `block_rows`
        is the result of the method `block_rows`."""
        runs = torch.index_select(self._runs, 0, block_rows + 2 * layer)
        return runs.view(2, num_seqs, self.num_kv_heads, -1, self.head_dim)

    def _first_runs(self, block_ids: torch.Tensor) -> torch.Tensor:
        """Returns the index of the run of K in layer 0 for each block and head, [..., heads]."""
        head_runs = (1 + self.layout.has_values) * self.num_layers
        return block_ids.unsqueeze(-1) * self._block_runs + self._heads * head_runs

    def write_index(self, number: int, token_rows: torch.Tensor, keys: torch.Tensor) -> None:
        """Stores keys of an indexer, [T, dim] of any dtype. `number` is the layer's index among the
        layers with an indexer. `token_rows` is the result of the method `token_rows`."""
        rows = token_rows[:, 0]
        at = rows // (self._block_runs * self.block_size), rows % self.block_size
        self.index_keys(number).index_put_(at, keys.to(self.dtype))

    def gather_index(self, number: int, block_tables: torch.Tensor) -> torch.Tensor:
        """Copies the indexer's keys of blocks to a tensor [B, M * block_size, dim]. `block_tables`
        is [B, M], the ids of M blocks for each of B sequences."""
        return self.index_keys(number)[block_tables].flatten(1, 2)

    def index_keys(self, number: int) -> torch.Tensor:
        """Returns the keys of one indexer as a view [num_blocks, block_size, dim]."""
        index = self.layout.index
        assert index is not None
        first = self.layout.num_kv_heads * self.layout.head_bytes
        keys = self.memory[:, first:].view(self.dtype)
        size = self.block_size * index.dim
        own = keys[:, number * size : (number + 1) * size]
        return own.view(-1, self.block_size, index.dim)


class LatentKvPool(KvPool):
    """A pool for latent attention. A token has one row: its latent, followed by its rotated key.
    The latent is also the token's value."""

    def write(
        self, layer: int, token_rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Stores keys [T, 1, D]: a latent and a rotated key per token. `values` is ignored, because
        the latent is the value."""
        rows = token_rows + layer * self.block_size
        self._tokens.index_put_((rows,), keys.to(self.dtype))

    def block_rows(self, block_tables: torch.Tensor) -> torch.Tensor:
        """Returns the indices of the blocks' runs in layer 0, [B * heads * M]. `block_tables` is
        [B, M], the ids of M blocks for each of B sequences."""
        return self._first_runs(block_tables).transpose(1, 2).flatten()

    def gather(self, layer: int, block_rows: torch.Tensor, num_seqs: int) -> torch.Tensor:
        """Copies the rows of blocks to a tensor [2, B, heads, M * block_size, D], in which keys and
        values are the same memory."""
        runs = torch.index_select(self._runs, 0, block_rows + layer)
        rows = runs.view(num_seqs, self.num_kv_heads, -1, self.head_dim)
        return rows.expand(2, *rows.shape)


class QuantizedLatentKvPool(LatentKvPool):
    """A pool for latent attention with int8 latents (kv_int8.py) and unquantized rotated keys.
    `gather` returns fp32."""

    def _make_views(self) -> None:
        assert self.layout.dtype == "int8"
        rotated = self.layout.rotated
        assert rotated is not None
        self.dtype = torch.float32
        size, (of_latent, of_key) = self.block_size, self.layout.row_bytes
        runs = [of_latent * size, of_key * size, 2 * size]
        parts = self.memory.view(-1, self.layout.layer_bytes)[:, : sum(runs)]
        latents, keys, scales = torch.split(parts, runs, 1)
        self._latents = latents.view(torch.int8).view(-1, size, of_latent)
        self._keys = keys.view(_DTYPES[rotated.dtype]).view(-1, size, rotated.dim)
        self._scales = scales.view(torch.float16)

    def write(
        self, layer: int, token_rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        at = token_rows // self.block_size + layer, token_rows % self.block_size
        latents, rotated = torch.split(keys, [self._latents.shape[-1], self._keys.shape[-1]], -1)
        numbers, scales = kv_int8.quantize(latents)
        self._latents.index_put_(at, numbers)
        self._keys.index_put_(at, rotated.to(self._keys.dtype))
        self._scales.index_put_(at, scales)

    def gather(self, layer: int, block_rows: torch.Tensor, num_seqs: int) -> torch.Tensor:
        parts = block_rows + layer
        latents = kv_int8.widen(self._latents[parts], self._scales[parts])
        rows = torch.cat((latents, self._keys[parts].float()), -1)
        rows = rows.view(num_seqs, self.num_kv_heads, -1, self.head_dim)
        return rows.expand(2, *rows.shape)


class QuantizedKvPool(KvPool):
    """A quantized pool in which each row has its own scale (kv_int8.py, kv_fp8.py, kv_int4.py).
    `gather` returns fp32."""

    def _make_views(self) -> None:
        self.dtype = torch.float32
        size = self.block_size
        self._formats = _FORMATS[self.layout.dtype]
        parts = self.memory.view(-1, self.layout.layer_bytes)
        self._numbers = []
        begin = 0
        for kind, row_bytes in zip(self._formats, self.layout.row_bytes, strict=True):
            end = begin + size * row_bytes
            run = parts[:, begin:end].view(torch.int8 if kind is kv_int8 else torch.uint8)
            self._numbers.append(run.view(-1, size, row_bytes))
            begin = end
        scales = parts.view(torch.float16)[:, begin // 2 :]
        self._scales = scales[:, : 2 * size].view(-1, 2, size)

    def layer(self, number: int) -> LayerKv:
        """Returns one layer as views, if K and V have one byte per element. Other formats have no
        views."""
        assert self.layout.row_bytes == (self.head_dim, self.head_dim)
        size, dim = self.block_size, self.head_dim
        shape = -1, self.layout.num_kv_heads, self.num_layers, self.layout.layer_bytes
        part = self.memory.view(shape)[:, self._own, number]
        runs = part[..., : 2 * size * dim].view(self._numbers[0].dtype)
        scales = part[..., 2 * size * dim : 2 * size * (dim + 2)].view(torch.float16)
        shape = -1, self.num_kv_heads, 2, size
        return LayerKv(runs.view(*shape, dim), scales.view(shape))

    def write(
        self, layer: int, token_rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Quantizes K and V and stores them as `KvPool.write` does."""
        parts = token_rows // (2 * self.block_size) + layer
        offsets = token_rows % self.block_size
        for which, rows in enumerate((keys, values)):
            numbers, scales = self._quantize(which, layer, rows)
            self._numbers[which].index_put_((parts, offsets), numbers)
            self._scales[:, which].index_put_((parts, offsets), scales)

    def gather(self, layer: int, block_rows: torch.Tensor, num_seqs: int) -> torch.Tensor:
        """Dequantizes the K and V of blocks to fp32 [2, B, heads, M * block_size, D]."""
        size = num_seqs, self.num_kv_heads, -1
        runs = []
        for which, parts in enumerate((block_rows // 2 + layer).view(2, -1)):
            numbers = self._numbers[which][parts]
            scales = self._scales[parts, which].view(size)
            runs.append(self._widen(which, layer, numbers.view(*size, numbers.shape[-1]), scales))
        return torch.stack(runs)

    def _quantize(
        self, which: int, layer: int, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantizes rows [T, heads, D] of K (`which` = 0) or V (`which` = 1). Returns the numbers
        and the scales."""
        return self._formats[which].quantize(rows)

    def _widen(
        self, which: int, layer: int, numbers: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        """Dequantizes rows [B, heads, tokens, bytes] of K (`which` = 0) or V (`which` = 1)."""
        return self._formats[which].widen(numbers, scales)


class FixedScaleKvPool(QuantizedKvPool):
    """An fp8_e4m3 pool with the static scales of a checkpoint."""

    def __init__(
        self,
        memory: torch.Tensor,
        layout: KvLayout,
        fixed: FixedScales,
        heads: range | None = None,
    ) -> None:
        super().__init__(memory, layout, heads)
        self.static = fixed
        self._fixed = fixed.scales

    def layer(self, number: int) -> LayerKv:
        return super().layer(number)._replace(fixed_scales=self._fixed[number])

    def _quantize(
        self, which: int, layer: int, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return kv_fp8.quantize(rows, self._fixed[layer, which])


class Int4KvPool(QuantizedKvPool):
    """An int4 pool. Its keys also have static scales per channel (kv_int4_keys.py)."""

    def __init__(
        self,
        memory: torch.Tensor,
        layout: KvLayout,
        key_channels: KeyChannels,
        heads: range | None = None,
    ) -> None:
        super().__init__(memory, layout, heads)
        self.static = key_channels
        own = key_channels if heads is None else key_channels.of_heads(heads)
        self._channels = own.order, own.scales, own.multipliers

    def _quantize(
        self, which: int, layer: int, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if which == 1:
            return kv_int4.quantize(rows)
        order, scales, _ = self._channels
        return kv_int4_keys.quantize(rows, order[layer], scales[layer])

    def _widen(
        self, which: int, layer: int, numbers: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        if which == 1:
            return kv_int4.widen(numbers, scales)
        order, _, multipliers = self._channels
        return kv_int4_keys.widen(numbers, scales, order[layer], multipliers[layer])


def layer_of(kv: torch.Tensor, layer: int) -> torch.Tensor:
    """Returns one layer of an unquantized pool as a view [num_blocks, heads, 2, block_size, D].
    `kv` is `KvPool.kv`."""
    return kv.select(2, layer)

"""Reads and writes of KV blocks in a pool of bytes, for torch's operators.

A block holds all layers, so one layer's K or V of one head in one block is a contiguous run of
`block_size` rows of D elements. Index tensors are made once a step for layer 0; other layers add
a constant. Knows no sequences: block ids and offsets in, rows out.
"""

from typing import NamedTuple, Protocol

import torch

from tandem_kernels import kv_fp8, kv_int4, kv_int4_keys, kv_int8
from tandem_kernels.kv_fp8 import FixedScales
from tandem_kernels.kv_int4_keys import KeyChannels

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


# What the bytes of all tokens stand on, beside their own scales.
StaticKv = KeyChannels | FixedScales


class RowFormat(Protocol):
    """This is what a module of rows in few bits has: kv_int8.py, kv_fp8.py, kv_int4.py."""

    def quantize(self, rows: torch.Tensor, /) -> tuple[torch.Tensor, torch.Tensor]: ...
    def widen(self, numbers: torch.Tensor, scales: torch.Tensor, /) -> torch.Tensor: ...


# Of K and of V.
_FORMATS: dict[str, tuple[RowFormat, RowFormat]] = {
    "int8": (kv_int8, kv_int8),
    "fp8_e4m3": (kv_fp8, kv_fp8),
    "k8v4": (kv_int8, kv_int4),
    "int4": (kv_int4, kv_int4),  # of keys see Int4KvPool
}


class RotatedKey(Protocol):
    """This is what a pool needs of tandem.common.dtypes.RotatedKey."""

    @property
    def dim(self) -> int: ...
    @property
    def dtype(self) -> str: ...


class KvLayout(Protocol):
    """This is what a pool needs of tandem.engine.cache.layout.block_layout.BlockLayout."""

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


class LayerKv(NamedTuple):
    """One layer of a pool, as strided views, for kernels that take strides."""

    numbers: torch.Tensor  # [num_blocks, heads, 2, block_size, D]; e4m3 as uint8
    scales: torch.Tensor | None  # [num_blocks, heads, 2, block_size] float16
    fixed_scales: torch.Tensor | None = None  # [2]: FixedScales of the layer


def make_pool(memory: torch.Tensor, layout: KvLayout, static: StaticKv | None = None) -> "KvPool":
    """`memory`: uint8 [num_blocks, block_bytes]. An int4 pool needs the channels of its layers; one
    of fp8_e4m3 may have fixed scales."""
    if layout.dtype == "int4":
        assert isinstance(static, KeyChannels)
        return Int4KvPool(memory, layout, static)
    if not layout.has_values:
        kind = LatentKvPool if layout.rotated is None else QuantizedLatentKvPool
        return kind(memory, layout)
    if static is not None:
        assert isinstance(static, FixedScales)
        return FixedScaleKvPool(memory, layout, static)
    return (KvPool if layout.dtype in _DTYPES else QuantizedKvPool)(memory, layout)


class KvPool:
    """Views of one pool's memory, with the strides that indexing needs."""

    static: StaticKv | None = None

    def __init__(self, memory: torch.Tensor, layout: KvLayout) -> None:
        assert memory.dtype == torch.uint8
        assert memory.shape == (layout.num_blocks, layout.block_bytes)
        self.memory = memory
        self.layout = layout
        self.num_kv_heads, self.num_layers = layout.num_kv_heads, layout.num_layers
        self.block_size, self.head_dim = layout.block_size, layout.head_dim
        self.device = memory.device
        self._heads = torch.arange(self.num_kv_heads, device=memory.device)
        self._make_views()

    def _make_views(self) -> None:
        self.dtype = _DTYPES[self.layout.dtype]  # of what `gather` brings
        self._tokens = self.memory.view(self.dtype).view(-1, self.head_dim)
        self._runs = self._tokens.view(-1, self.block_size * self.head_dim)

    @property
    def kv(self) -> torch.Tensor:
        """The pool as [num_blocks, heads, layers, 2, block_size, D]; 1 for 2 without values."""
        runs = 1 + self.layout.has_values
        shape = self.num_kv_heads, self.num_layers, runs, self.block_size, self.head_dim
        return self._tokens.view(-1, *shape)

    def layer(self, number: int) -> LayerKv:
        return LayerKv(layer_of(self.kv, number), None)

    def token_rows(self, block_ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Returns the rows [T, heads] of layer 0's K, for slots (block id, offset), each [T]."""
        return self._first_runs(block_ids) * self.block_size + offsets.unsqueeze(-1)

    def write(
        self, layer: int, token_rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Stores K and V, each [T, heads, D] in any dtype, in the slots of `token_rows`."""
        rows = token_rows + 2 * layer * self.block_size
        self._tokens.index_put_((rows,), keys.to(self.dtype))
        self._tokens.index_put_((rows + self.block_size,), values.to(self.dtype))

    def block_rows(self, block_tables: torch.Tensor) -> torch.Tensor:
        """Returns the runs of layer 0's K and V in blocks [B, M]: [2 * B * heads * M]."""
        runs = self._first_runs(block_tables).transpose(1, 2)
        return torch.stack((runs, runs + 1)).flatten()

    def gather(self, layer: int, block_rows: torch.Tensor, num_seqs: int) -> torch.Tensor:
        """K and V of whole blocks, copied together: [2, B, heads, M * block_size, D]."""
        runs = torch.index_select(self._runs, 0, block_rows + 2 * layer)
        return runs.view(2, num_seqs, self.num_kv_heads, -1, self.head_dim)

    def _first_runs(self, block_ids: torch.Tensor) -> torch.Tensor:
        """Returns the run of layer 0's K in each block, for each head: [..., heads]."""
        heads = block_ids.unsqueeze(-1) * self.num_kv_heads + self._heads
        return heads * ((1 + self.layout.has_values) * self.num_layers)


class LatentKvPool(KvPool):
    """A pool of latent attention: a token has one row, whose first numbers are its value, too."""

    def write(
        self, layer: int, token_rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Stores keys [T, 1, D]; values are a part of them."""
        rows = token_rows + layer * self.block_size
        self._tokens.index_put_((rows,), keys.to(self.dtype))

    def block_rows(self, block_tables: torch.Tensor) -> torch.Tensor:
        """Returns the runs of layer 0 in blocks [B, M]: [B * heads * M]."""
        return self._first_runs(block_tables).transpose(1, 2).flatten()

    def gather(self, layer: int, block_rows: torch.Tensor, num_seqs: int) -> torch.Tensor:
        """Rows of whole blocks, as keys and as values: [2, B, heads, M * block_size, D]."""
        runs = torch.index_select(self._runs, 0, block_rows + layer)
        rows = runs.view(num_seqs, self.num_kv_heads, -1, self.head_dim)
        return rows.expand(2, *rows.shape)


class QuantizedLatentKvPool(LatentKvPool):
    """A pool of latents of int8 (kv_int8.py), whose rotated keys are as computed. `gather` brings
    what they stand for."""

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
    """A pool of few bits with scales (kv_int8.py, kv_fp8.py, kv_int4.py). `gather` brings what they
    stand for."""

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
        """Views a pool whose K and V are of the same number of bytes each."""
        assert self.layout.row_bytes == (self.head_dim, self.head_dim)
        size, dim = self.block_size, self.head_dim
        shape = -1, self.num_kv_heads, self.num_layers, self.layout.layer_bytes
        part = self.memory.view(shape)[:, :, number]
        runs = part[..., : 2 * size * dim].view(self._numbers[0].dtype)
        scales = part[..., 2 * size * dim : 2 * size * (dim + 2)].view(torch.float16)
        shape = -1, self.num_kv_heads, 2, size
        return LayerKv(runs.view(*shape, dim), scales.view(shape))

    def write(
        self, layer: int, token_rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Stores K and V as KvPool.write does, quantized."""
        parts = token_rows // (2 * self.block_size) + layer
        offsets = token_rows % self.block_size
        for which, rows in enumerate((keys, values)):
            numbers, scales = self._quantize(which, layer, rows)
            self._numbers[which].index_put_((parts, offsets), numbers)
            self._scales[:, which].index_put_((parts, offsets), scales)

    def gather(self, layer: int, block_rows: torch.Tensor, num_seqs: int) -> torch.Tensor:
        """K and V of whole blocks in fp32: [2, B, heads, M * block_size, D]."""
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
        """K (0) or V (1) of tokens, [T, heads, D]."""
        return self._formats[which].quantize(rows)

    def _widen(
        self, which: int, layer: int, numbers: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        """K (0) or V (1) of tokens, [B, heads, tokens, bytes]."""
        return self._formats[which].widen(numbers, scales)


class FixedScaleKvPool(QuantizedKvPool):
    """A pool of fp8_e4m3 whose scales are a checkpoint's."""

    def __init__(self, memory: torch.Tensor, layout: KvLayout, fixed: FixedScales) -> None:
        super().__init__(memory, layout)
        self.static = fixed
        self._fixed = fixed.scales

    def layer(self, number: int) -> LayerKv:
        return super().layer(number)._replace(fixed_scales=self._fixed[number])

    def _quantize(
        self, which: int, layer: int, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return kv_fp8.quantize(rows, self._fixed[layer, which])


class Int4KvPool(QuantizedKvPool):
    """A quantized pool whose keys lie by static channels (kv_int4_keys.py)."""

    def __init__(self, memory: torch.Tensor, layout: KvLayout, key_channels: KeyChannels) -> None:
        super().__init__(memory, layout)
        self.static = key_channels
        self._channels = key_channels.order, key_channels.scales, key_channels.multipliers

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
    """One layer of a pool of floats, a strided view [num_blocks, heads, 2, block_size, D]."""
    return kv.select(2, layer)

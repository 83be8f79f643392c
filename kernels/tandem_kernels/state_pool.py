"""The states of layers with linear attention in a pool of bytes, with torch."""

from collections.abc import Sequence
from typing import Protocol, cast

import torch

from tandem_kernels.kv_cache import KvPool
from tandem_kernels.row_pool import RowPool


class StateLayout(Protocol):
    """The properties of tandem.engine.cache.layout.state_layout.StateLayout that a pool uses."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def head_bytes(self) -> int: ...
    @property
    def layer_bytes(self) -> int: ...
    @property
    def matrix_shape(self) -> tuple[int, int]: ...
    @property
    def conv_shape(self) -> tuple[int, int]: ...


class StatePool:
    """The states of a state group. A slot has the states of one sequence in all layers."""

    def __init__(
        self, memory: torch.Tensor, layout: StateLayout, heads: range | None = None
    ) -> None:
        """`memory` is uint8 [slots, bytes of a slot]. `heads` are the heads that this process
        computes; None: all of them."""
        assert memory.dtype == torch.uint8
        assert memory.shape == (layout.num_blocks, layout.block_bytes)
        assert layout.dtype == "float32"
        self.memory = memory
        self.layout = layout
        parts = memory.view(torch.float32).view(
            layout.num_blocks, layout.num_kv_heads, layout.num_layers, layout.layer_bytes // 4
        )
        if heads is not None:
            parts = parts[:, heads.start : heads.stop]
        num_matrix = layout.matrix_shape[0] * layout.matrix_shape[1]
        num_conv = layout.conv_shape[0] * layout.conv_shape[1]
        self._matrices = parts[..., :num_matrix].view(*parts.shape[:3], *layout.matrix_shape)
        convs = parts[..., num_matrix : num_matrix + num_conv]
        self._convs = convs.view(*parts.shape[:3], *layout.conv_shape)

    def parts(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the recurrent states [heads, layers, key dim, value dim] of a slot, and the last
        inputs of its convolutions [heads, layers, kernel - 1, channels / heads], as views."""
        return self._matrices[slot], self._convs[slot]

    def matrices(self, layer: int) -> torch.Tensor:
        """Returns the recurrent states of a layer, float32 [slots, heads, key dim, value dim], as a
        view. `layer` is its index in the group."""
        return self._matrices[:, :, layer]

    def convs(self, layer: int) -> torch.Tensor:
        """Returns the last inputs of a layer's convolution, float32 [slots, heads, kernel - 1,
        channels / heads], as a view."""
        return self._convs[:, :, layer]


class PackedStatePool:
    """The states of a state group in bfloat16 or int8. Kernels compute on a `StatePool`, from and
    to which states are copied here.

    With int8, the numbers of a matrix's row share a scale, which is the largest of them divided by
    127. A convolution's inputs are in bfloat16.
    """

    def __init__(self, memory: torch.Tensor, layout: StateLayout) -> None:
        """`memory` is uint8 [slots, bytes of a slot]."""
        assert memory.dtype == torch.uint8
        assert memory.shape == (layout.num_blocks, layout.block_bytes)
        self.memory = memory
        self.layout = layout
        sizes = layout.num_blocks, layout.num_kv_heads, layout.num_layers
        parts = memory.view(*sizes, layout.layer_bytes)
        (keys, values), (taps, channels) = layout.matrix_shape, layout.conv_shape
        num_conv = 2 * taps * channels
        self._scales = None
        if layout.dtype == "int8":
            scales, conv, matrix = torch.split(
                parts[..., : 4 * keys + num_conv + keys * values],
                [4 * keys, num_conv, keys * values],
                -1,
            )
            self._scales = scales.view(torch.float32).unsqueeze(-1)
            matrix = matrix.view(torch.int8)
        else:
            matrix, conv = torch.split(
                parts[..., : 2 * keys * values + num_conv], [2 * keys * values, num_conv], -1
            )
            matrix = matrix.view(torch.bfloat16)
        self._matrices = matrix.view(*matrix.shape[:-1], keys, values)
        conv = conv.view(torch.bfloat16)
        self._convs = conv.view(*conv.shape[:-1], taps, channels)

    def load(self, slot: int, pool: StatePool, target: int) -> None:
        """Copies the states of `slot` to the slot `target` of `pool`."""
        matrices, convs = pool.parts(target)
        convs.copy_(self._convs[slot])
        matrices.copy_(self._matrices[slot])
        if self._scales is not None:
            matrices *= self._scales[slot]

    def store(self, slot: int, pool: StatePool, source: int) -> None:
        """Copies the states of the slot `source` of `pool` to `slot`."""
        matrices, convs = pool.parts(source)
        self._convs[slot].copy_(convs)
        if self._scales is not None and matrices.numel():
            scales = matrices.abs().amax(-1, keepdim=True) / 127
            self._scales[slot].copy_(scales)
            matrices = (matrices / scales.clamp_min(torch.finfo(torch.float32).tiny)).round()
        self._matrices[slot].copy_(matrices)


Pool = KvPool | RowPool | StatePool


def without_states(pools: Sequence[Pool]) -> Sequence[KvPool]:
    """Returns `pools`, all of which must be a `KvPool`."""
    assert all(isinstance(pool, KvPool) for pool in pools)
    return cast(Sequence[KvPool], pools)

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

    def matrices(self, layer: int) -> torch.Tensor:
        """Returns the recurrent states of a layer, float32 [slots, heads, key dim, value dim], as a
        view. `layer` is its index in the group."""
        return self._matrices[:, :, layer]

    def convs(self, layer: int) -> torch.Tensor:
        """Returns the last inputs of a layer's convolution, float32 [slots, heads, kernel - 1,
        channels / heads], as a view."""
        return self._convs[:, :, layer]


Pool = KvPool | RowPool | StatePool


def without_states(pools: Sequence[Pool]) -> Sequence[KvPool]:
    """Returns `pools`, all of which must be a `KvPool`."""
    assert all(isinstance(pool, KvPool) for pool in pools)
    return cast(Sequence[KvPool], pools)

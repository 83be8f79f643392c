"""KV pools for kernel tests, built from tensors or a layout."""

from __future__ import annotations

import torch

from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem_kernels.kv_cache import KvPool, make_pool
from tandem_kernels.kv_int4_keys import KeyChannels


def pool_of(kv: torch.Tensor) -> KvPool:
    """Wraps the memory of `kv`, [num_blocks, heads, layers, 2, block_size, D], as a pool."""
    num_blocks, heads, layers, _, block_size, head_dim = kv.shape
    dtype = str(kv.dtype).removeprefix("torch.")
    layout = BlockLayout(num_blocks, heads, layers, block_size, head_dim, dtype)
    return make_pool(kv.view(num_blocks, -1).view(torch.uint8), layout)


def empty_pool(layout: BlockLayout, device: torch.device | None = None) -> KvPool:
    """Creates a pool of zeros."""
    size = layout.num_blocks, layout.block_bytes
    memory = torch.zeros(size, dtype=torch.uint8, device=device)
    return make_pool(memory, layout, some_channels(layout) if layout.dtype == "int4" else None)


def some_channels(layout: BlockLayout) -> KeyChannels:
    """Creates channels for an int4 pool that differ between layers and heads."""
    generator = torch.Generator().manual_seed(11)
    shape = layout.num_layers, layout.num_kv_heads, layout.head_dim
    order = torch.rand(shape, generator=generator).argsort(-1)
    scales = 2 ** torch.randint(-2, 3, shape, generator=generator).float()
    return KeyChannels(order.int(), scales)

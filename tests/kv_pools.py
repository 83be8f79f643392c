"""KV pools for tests of kernels, made of tensors or of a layout."""

from __future__ import annotations

import torch

from tandem.engine.cache.layout import BlockLayout
from tandem_kernels.kv_cache import KvPool, make_pool


def pool_of(kv: torch.Tensor) -> KvPool:
    """Returns the pool that lies in `kv`, [num_blocks, heads, layers, 2, block_size, D]."""
    num_blocks, heads, layers, _, block_size, head_dim = kv.shape
    dtype = str(kv.dtype).removeprefix("torch.")
    layout = BlockLayout(num_blocks, heads, layers, block_size, head_dim, dtype)
    return make_pool(kv.view(num_blocks, -1).view(torch.uint8), layout)


def empty_pool(layout: BlockLayout) -> KvPool:
    """Returns a pool of zeros."""
    return make_pool(torch.zeros(layout.num_blocks, layout.block_bytes, dtype=torch.uint8), layout)

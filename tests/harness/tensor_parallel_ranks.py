"""Pools of simulated tensor-parallel ranks, filled with slices of all heads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.transfer.tensor_parallel import BlockPairs, ParallelLayout

Bytes = NDArray[np.uint8]


def whole_model(seed: int, layout: BlockLayout) -> Bytes:
    """Random contents of a pool with all heads: [num_blocks, num_kv_heads, bytes of a head]."""
    rng = np.random.default_rng(seed)
    shape = (layout.num_blocks, layout.num_kv_heads, -1)
    return rng.integers(0, 256, layout.pool_bytes, dtype=np.uint8).reshape(shape)


def rank_pools(whole: Bytes, layout: ParallelLayout) -> list[Bytes]:
    """The flat content of each rank's memory, computed in the simplest way."""
    num_heads = whole.shape[1]
    groups = min(layout.degree, num_heads)
    shares = np.split(whole, groups, axis=1)
    return [shares[rank * groups // layout.degree].reshape(-1) for rank in range(layout.degree)]


def expected_pools(whole: Bytes, local: ParallelLayout, blocks: BlockPairs) -> list[Bytes]:
    """Each local rank's memory after the blocks were read into zeros."""
    moved = np.zeros((local.whole.num_blocks, *whole.shape[1:]), np.uint8)
    for producer_id, local_id in zip(blocks.producer_ids, blocks.local_ids, strict=True):
        moved[local_id] = whole[producer_id]
    return rank_pools(moved, local)

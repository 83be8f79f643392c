"""Pools of simulated tensor-parallel ranks, filled with slices of all heads."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tandem.engine.cache.layout.kv_groups import KvLayout

Bytes = NDArray[np.uint8]


def whole_model(seed: int, layout: KvLayout) -> list[Bytes]:
    """Random contents of the pools with all heads, one of each KV group:
    [num_blocks, num_kv_heads, bytes of a head]."""
    rng = np.random.default_rng(seed)
    return [
        rng.integers(0, 256, group.pool_bytes, dtype=np.uint8).reshape(
            group.num_blocks, group.num_kv_heads, -1
        )
        for group in (each.layout for each in layout.groups)
    ]


def rank_pools(whole: list[Bytes], num_ranks: int) -> list[Bytes]:
    """The flat content of each rank's memory, computed in the simplest way."""
    shares = [np.split(group, min(num_ranks, group.shape[1]), axis=1) for group in whole]
    return [
        np.concatenate([parts[rank * len(parts) // num_ranks].reshape(-1) for parts in shares])
        for rank in range(num_ranks)
    ]


def moved(whole: list[Bytes], layout: KvLayout, pairs: Mapping[int, int]) -> list[Bytes]:
    """Pools of `layout` with zeros, into which blocks of pools with the contents `whole` were read.
    `pairs` has the local block by the producer's block, with their ids among all pools. It has all
    pieces of a slot."""
    pools = [
        np.zeros((size, *group.shape[1:]), np.uint8)
        for size, group in zip(layout.sizes, whole, strict=True)
    ]
    for producer_id, local_id in pairs.items():
        number, block = layout.locate(local_id)
        nums = [group.num_pieces for group in layout.groups]
        first = sum(len(pool) * num for pool, num in zip(whole[:number], nums, strict=False))
        pools[number][block] = whole[number][(producer_id - first) // nums[number]]
    return pools

"""The blocks that the transfer bench moves: two models' block sizes, rows, scattered ids."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.engine.cache.layout.kv_groups import KvLayout

BLOCKS = (1, 4, 16, 64, 256, 512, 1024)
POOL_BYTES_MAX = 1 << 30  # of each side
# heads, layers, tokens of a block, head size, dtype
_SHAPES = {
    "SmolLM2-135M": (3, 30, 16, 64, "bfloat16"),
    "SmolLM2-135M int8": (3, 30, 16, 64, "int8"),
    "SmolLM2-135M fp8_e4m3": (3, 30, 16, 64, "fp8_e4m3"),
    "SmolLM2-135M k8v4": (3, 30, 16, 64, "k8v4"),
    "SmolLM2-135M int4": (3, 30, 16, 64, "int4"),
    "Llama-3-8B": (8, 32, 16, 128, "bfloat16"),
}
MODELS = tuple(_SHAPES)


@dataclass(frozen=True, slots=True)
class Plan:
    """One model's rows, and the pool that holds the largest of them."""

    model: str
    layout: KvLayout
    blocks: tuple[int, ...]
    cut: tuple[int, ...]  # rows asked for that do not fit the pool's bound


def layout_of(model: str, num_blocks: int) -> KvLayout:
    return KvLayout.of_one(BlockLayout(num_blocks, *_SHAPES[model]))


def plan(model: str, blocks: tuple[int, ...], pool_bytes_max: int) -> Plan:
    blocks_max = pool_bytes_max // layout_of(model, 1).block_bytes
    kept = tuple(sorted(n for n in set(blocks) if n <= blocks_max))
    cut = tuple(sorted(n for n in set(blocks) if n > blocks_max))
    if not kept:
        raise ValueError(f"no row fits: {blocks_max} blocks of {model} are in {pool_bytes_max} B")
    return Plan(model, layout_of(model, max(kept)), kept, cut)


def scattered(num_blocks: int, *, seed: int) -> list[int]:
    """All ids of a pool in a random order; a transfer of n blocks takes the first n."""
    ids = list(range(num_blocks))
    random.Random(seed).shuffle(ids)
    return ids

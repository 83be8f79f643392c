"""The pools that the transfer tests move blocks between: their layout, their order, their bytes.

TRANSFER_MODEL names the model whose blocks they are, and perhaps a dtype: "SmolLM2-135M" (one KV
group), "Gemma-3-270M int8" (two groups, whose blocks differ in size), "DeepSeek-V2-Lite int8"
(latents with rotated keys beside them). A test sets it for all of its processes: `MODELS` are the
one that was named and one with groups.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.common.dtypes import RotatedKey
from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.engine.cache.layout.block_spans import BlockSpans
from tandem.engine.cache.layout.kv_groups import KvGroup, KvLayout
from tandem_bench.sizes import layout_of, scattered

VARIABLE = "TRANSFER_MODEL"
MODELS = tuple(dict.fromkeys((os.environ.get(VARIABLE, "SmolLM2-135M"), "Gemma-3-270M int8")))
NUM_BLOCKS = 128
_GROUPED = "Gemma-3-270M"
_LATENT = "DeepSeek-V2-Lite"
_WINDOW_BLOCKS = 16  # of the pool of 15 layers; 3 layers see all


def layout() -> KvLayout:
    """The layout of all pools of a test."""
    return _layout(os.environ.get(VARIABLE, MODELS[0]))


@cache
def _layout(model: str) -> KvLayout:
    name, _, dtype = model.partition(" ")
    if name == _LATENT:
        rotated = RotatedKey(64, "bfloat16")
        sizes = NUM_BLOCKS, 1, 27, 16, 512 + rotated.dim
        return KvLayout.of_one(BlockLayout(*sizes, "int8", has_values=False, rotated=rotated))
    if name != _GROUPED:
        return layout_of(model, NUM_BLOCKS)
    layers = tuple(range(18))
    full = layers[5::6]
    window = tuple(layer for layer in layers if layer % 6 != 5)
    shapes = ((full, None, NUM_BLOCKS - _WINDOW_BLOCKS), (window, 512, _WINDOW_BLOCKS))
    return KvLayout(
        tuple(
            KvGroup(of, seen, BlockLayout(size, 1, len(of), 16, 256, dtype or "bfloat16"))
            for of, seen, size in shapes
        )
    )


def scattered_blocks(seed: int) -> list[int]:
    """All block ids in a random order. A place in it has the same group whatever the seed."""
    sizes = layout().sizes
    firsts = layout().first_ids
    places = sorted(
        (number / size, group) for group, size in enumerate(sizes) for number in range(size)
    )
    ids = [iter(scattered(size, seed=seed)) for size in sizes]
    return [firsts[group] + next(ids[group]) for _, group in places]


def contents(seed: int) -> NDArray[np.uint8]:
    """Returns the memory of a pool with that seed."""
    return np.random.default_rng(seed).integers(0, 256, layout().pool_bytes, dtype=np.uint8)


@dataclass(frozen=True, eq=False)
class PoolBlocks:
    """The bytes of blocks by their ids, as an array's rows: those of several follow each other."""

    memory: NDArray[np.uint8]
    spans: BlockSpans

    def __getitem__(self, ids: Any) -> NDArray[np.uint8]:
        return np.concatenate([self.memory[:0], *(self.memory[span] for span in self._of(ids))])

    def __setitem__(self, ids: Any, value: int) -> None:
        for span in self._of(ids):
            self.memory[span] = value

    def __eq__(self, value: object) -> Any:
        return self.memory == value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[np.uint8]:
        return self.memory

    def _of(self, ids: Any) -> list[slice]:
        wanted = np.atleast_1d(np.arange(self.spans.num_blocks)[ids])
        return [self.spans.span(int(block_id)) for block_id in wanted]

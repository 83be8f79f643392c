"""Estimates how often blocks were used lately, in a few bytes for each: a count-min sketch.

A block counts in one cell of each row, by a part of its hash, and the smallest of its cells is its
estimate. A use weighs twice as much as one that lies a half-life before it, so what was used long
ago fades, and two blocks that nobody uses keep their order. Compare TinyLFU (Einziger, Friedman and
Manes, 2017), which halves all cells now and then.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_ROWS = 4  # a block hash has 16 bytes: 4 for each row
_CELLS_PER_BLOCK = 4
_HALF_LIFE = 4  # uses of each block: the best of four in benchmarks/tier_policies.py
_RESCALE_AT = 64.0  # log2 of a use's weight


class FrequencySketch:
    def __init__(self, num_blocks: int) -> None:
        """`num_blocks` is how many different blocks it has to tell apart."""
        width = 1 << max(6, (_CELLS_PER_BLOCK * num_blocks - 1).bit_length())
        self._cells = np.zeros((_ROWS, width))
        self._mask = width - 1
        self._half_life = _HALF_LIFE * max(num_blocks, 16)
        self._weight_log2 = 0.0  # of a use now, in cells
        self._scale_log2 = 0.0  # that was taken out of the cells

    def add(self, block_hashes: Sequence[bytes], num_uses: int = 1) -> None:
        """Counts `num_uses` uses of each of these blocks, which differ."""
        if not block_hashes:
            return
        weight = num_uses * math.exp2(self._weight_log2)
        for row, at in enumerate(self._find(b"".join(block_hashes)).T):
            self._cells[row, at] += weight
        self._weight_log2 += num_uses * len(block_hashes) / self._half_life
        if self._weight_log2 > _RESCALE_AT:
            self._cells *= math.exp2(-_RESCALE_AT)
            self._weight_log2 -= _RESCALE_AT
            self._scale_log2 += _RESCALE_AT

    def estimate(self, block_hash: bytes) -> float:
        """Returns the uses of a block, each as it weighs now."""
        return self._smallest(block_hash) / math.exp2(self._weight_log2)

    def log2(self, block_hash: bytes) -> float:
        """Returns the logarithm of the estimate, but for a number that only grows and is the same
        for all blocks: so results of different times can be compared."""
        count = self._smallest(block_hash)
        return self._scale_log2 + math.log2(count) if count else -math.inf

    def _smallest(self, block_hash: bytes) -> float:
        (at,) = self._find(block_hash)
        return float(self._cells[range(_ROWS), at].min())

    def _find(self, hashes: bytes) -> npt.NDArray[np.uint32]:
        """Returns the cells of blocks, [num_blocks, rows]."""
        return np.frombuffer(hashes, "<u4").reshape(-1, _ROWS) & np.uint32(self._mask)

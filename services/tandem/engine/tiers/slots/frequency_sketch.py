"""Estimates how often blocks were used lately, in a few bytes for each: a count-min sketch.

A block counts in one cell of each row, by a part of its hash, and the smallest of its cells is its
estimate. A use weighs twice as much as one that lies a half-life before it, so what was used long
ago fades, and two blocks that nobody uses keep their order. Compare TinyLFU (Einziger, Friedman and
Manes, 2017), which halves all cells now and then.

The cells are read and written by _sketch_cells.c. Where it could not be compiled, NumPy and Python
do the same, and take several times as long.
"""

import math
from collections.abc import Sequence
from struct import Struct

import numpy as np

try:
    from tandem.engine.tiers.slots import _sketch_cells
except ImportError:
    _sketch_cells = None  # type: ignore[assignment]

_ROWS = 4  # a block hash has 16 bytes: 4 for each row
_PARTS = Struct("<4I")  # of a block hash
_CELLS_PER_BLOCK = 4
_HALF_LIFE = 4  # uses of each block: the best of four in benchmarks/tiers/policies.py
_PREFAULT_BYTES_MAX = 1 << 26  # of the cells; 524,288 blocks take as much
_RESCALE_AT = 64.0  # log2 of a use's weight


class FrequencySketch:
    def __init__(self, num_blocks: int) -> None:
        """`num_blocks` is how many different blocks it has to tell apart."""
        width = 1 << max(6, (_CELLS_PER_BLOCK * num_blocks - 1).bit_length())
        self._cells = np.zeros(_ROWS * width)  # row after row
        if self._cells.nbytes <= _PREFAULT_BYTES_MAX:
            self._cells.fill(0.0)  # takes the memory now: a first use later would wait for it
        self._view = self._cells.data  # reads a block's cells sooner than NumPy does
        self._starts = np.arange(_ROWS, dtype=np.intp) * width  # of the rows
        self._width = width
        self._half_life = _HALF_LIFE * max(num_blocks, 16)
        self._weight_log2 = 0.0  # of a use now, in cells
        self._scale_log2 = 0.0  # that was taken out of the cells

    def add(self, block_hashes: Sequence[bytes], num_uses: int = 1) -> None:
        """Counts `num_uses` uses of each of these blocks, which differ."""
        if not block_hashes:
            return
        weight = num_uses * math.exp2(self._weight_log2)
        if _sketch_cells is not None:
            _sketch_cells.add(self._cells, block_hashes, weight)
        else:
            self._add_plainly(block_hashes, weight)
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
        if _sketch_cells is not None:
            return _sketch_cells.smallest(self._cells, block_hash)
        return self._smallest_plainly(block_hash)

    def _add_plainly(self, block_hashes: Sequence[bytes], weight: float) -> None:
        parts = np.frombuffer(b"".join(block_hashes), "<u4").reshape(-1, _ROWS)
        np.add.at(self._cells, (parts & np.uint32(self._width - 1)) + self._starts, weight)

    def _smallest_plainly(self, block_hash: bytes) -> float:
        a, b, c, d = _PARTS.unpack(block_hash)
        cells = self._view
        width = self._width
        last = width - 1
        count: float = min(
            cells[a & last],
            cells[width + (b & last)],
            cells[2 * width + (c & last)],
            cells[3 * width + (d & last)],
        )
        return count

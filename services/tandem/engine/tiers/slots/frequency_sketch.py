"""Estimates how often blocks were used recently, in a few bytes per block: a count-min sketch.

The sketch has four rows of cells. A block has one cell in each row, selected by four bytes of the
block's hash. A use of the block adds a weight to its four cells. The smallest of these cells is the
estimate, because other blocks that share a cell only make the cell larger.

A use counts twice as much as a use one half-life earlier, so old uses fade. The sketch does not
reduce the cells for this, but doubles the weight of a new use with each half-life. So the order of
two blocks that are not used does not change. Compare TinyLFU (Einziger, Friedman and Manes, 2017),
which halves all cells from time to time.

_sketch_cells.c reads and writes the cells. If it could not be compiled, NumPy and Python do the
same several times more slowly.
"""

import math
from collections.abc import Sequence
from struct import Struct

import numpy as np

try:
    from tandem.engine.tiers.slots import _sketch_cells
except ImportError:
    _sketch_cells = None  # type: ignore[assignment]

_ROWS = 4  # a block hash has 16 bytes, 4 for each row
_PARTS = Struct("<4I")  # splits a block hash into one number for each row
_CELLS_PER_BLOCK = 4
# A use counts only half after this many further uses per block of the sketch: after 4,000 uses in a
# sketch for 1,000 blocks. This was the best of four values in benchmarks/tiers/policies.py.
_HALF_LIFE = 4
# If all cells together have at most this many bytes, their memory is allocated at the start. This
# is so in sketches for up to 524,288 blocks.
_PREFAULT_BYTES_MAX = 1 << 26
_RESCALE_AT = 64.0  # when log2 of the weight of a use exceeds this, all cells are scaled down


class FrequencySketch:
    def __init__(self, num_blocks: int) -> None:
        """`num_blocks` is the number of different blocks that the sketch should distinguish."""
        width = 1 << max(6, (_CELLS_PER_BLOCK * num_blocks - 1).bit_length())
        self._cells = np.zeros(_ROWS * width)  # shape [rows * width]
        if self._cells.nbytes <= _PREFAULT_BYTES_MAX:
            # Allocates the pages now; otherwise the first uses would wait for them.
            self._cells.fill(0.0)
        # Reading single cells is faster through this view than through NumPy.
        self._view = self._cells.data
        self._starts = np.arange(_ROWS, dtype=np.intp) * width  # index of each row's first cell
        self._width = width
        self._half_life = _HALF_LIFE * max(num_blocks, 16)
        self._weight_log2 = 0.0  # log2 of the weight that a use adds to a cell now
        # log2 of the factor by which all cells have been scaled down in total
        self._scale_log2 = 0.0

    def add(self, block_hashes: Sequence[bytes], num_uses: int = 1) -> None:
        """Counts `num_uses` uses of each of these blocks. The hashes must be distinct."""
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
        """Returns the estimated number of uses. A use just now counts 1, and older uses count
        less."""
        return self._smallest(block_hash) / math.exp2(self._weight_log2)

    def log2(self, block_hash: bytes) -> float:
        """Returns log2 of the estimate, plus an offset that is the same for all blocks. The offset
        grows as estimates fade, so the result for an unused block stays the same and can be
        compared with later results."""
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

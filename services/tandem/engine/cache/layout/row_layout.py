"""The order of bytes in the pool of a group that keeps rows of its own for each block: the entries
of compressors, or the inputs of their entries (models/config/compressor.py).

A pool is an array [num_blocks] of blocks. A block has one part after the other, without padding:

    part 0 [rows][elements] | part 1 [rows][elements] | ...

The parts of entries, for each layer with a compressor, are attention's entries and then the
indexer's, if there is one. An entry is in the block of the last token of its run. If runs are
longer than blocks, each block has room for one entry, but only the blocks at the ends of runs have
one. Inputs have one part for each layer, with a row for each token of the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.common.dtypes import DTYPE_BYTES
from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.models.config.compressor import Compressor


class Rows(NamedTuple):
    """The shape of a part of a block."""

    num: int
    dim: int


@dataclass(frozen=True, slots=True)
class RowLayout(BlockLayout):
    """The shape of a pool with rows. `num_layers` is the number of parts. There is one head."""

    parts: tuple[Rows, ...] = field(kw_only=True)

    @classmethod
    def of_entries(
        cls, compressors: Sequence[Compressor], *, num_blocks: int, block_size: int, dtype: str
    ) -> RowLayout:
        """Returns the layout of the entries of layers with these compressors."""
        parts = [
            Rows(max(1, block_size // each.rate), dim) for each in compressors for dim in each.dims
        ]
        return cls._of(parts, num_blocks, block_size, dtype)

    @classmethod
    def of_inputs(
        cls,
        compressor: Compressor,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        dtype: str,
    ) -> RowLayout:
        """Returns the layout of the inputs and gates of layers with this compressor."""
        parts = [Rows(block_size, compressor.num_inputs)] * num_layers
        return cls._of(parts, num_blocks, block_size, dtype)

    @classmethod
    def _of(cls, parts: Sequence[Rows], num_blocks: int, block_size: int, dtype: str) -> RowLayout:
        return cls(
            num_blocks=num_blocks,
            num_kv_heads=1,
            num_layers=len(parts),
            block_size=block_size,
            head_dim=max(part.dim for part in parts),
            dtype=dtype,
            has_values=False,
            parts=tuple(parts),
        )

    @property
    def block_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * sum(part.num * part.dim for part in self.parts)

    def describe(self) -> str:
        parts = ",".join(f"{part.num}x{part.dim}" for part in self.parts)
        return f"rows={parts} block={self.block_size} dtype={self.dtype}"

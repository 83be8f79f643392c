"""Reads and writes blocks of rows in a pool of bytes, with torch: the entries of compressors and
the inputs of their entries (compressed.py)."""

from collections.abc import Sequence
from typing import Protocol

import torch

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Rows(Protocol):
    """The properties of tandem.engine.cache.layout.row_layout.Rows that a pool uses."""

    @property
    def num(self) -> int: ...
    @property
    def dim(self) -> int: ...


class RowLayout(Protocol):
    """The properties of tandem.engine.cache.layout.row_layout.RowLayout that a pool uses."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def parts(self) -> Sequence[Rows]: ...


class RowPool:
    """A pool whose blocks have several parts, each with rows of one size."""

    def __init__(self, memory: torch.Tensor, layout: RowLayout) -> None:
        """`memory` is uint8 [num_blocks, bytes of a block]."""
        assert memory.dtype == torch.uint8
        assert memory.shape == (layout.num_blocks, layout.block_bytes)
        self.memory = memory
        self.layout = layout
        self.block_size = layout.block_size
        numbers = memory.view(_DTYPES[layout.dtype])
        sizes = [part.num * part.dim for part in layout.parts]
        self._parts: list[torch.Tensor] = [
            torch.unflatten(own, 1, (part.num, part.dim))
            for own, part in zip(torch.split(numbers, sizes, 1), layout.parts, strict=True)
        ]

    def token_rows(self, block_ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Returns the number of each token's row in parts with a row for each token, [T]. The
        arguments, both [T], are the id of the token's block and the token's offset in it."""
        return block_ids * self.block_size + offsets

    def write(self, part: int, numbers: torch.Tensor, rows: torch.Tensor) -> None:
        """Stores rows [T, dim] of any dtype in a part. `numbers` [T] counts the rows of all blocks:
        row r of block b has the number b * rows + r."""
        own = self._parts[part]
        own.index_put_((numbers // own.shape[1], numbers % own.shape[1]), rows.to(own.dtype))

    def read(self, part: int, numbers: torch.Tensor) -> torch.Tensor:
        """Returns the rows of a part with these numbers, [..., dim]."""
        own = self._parts[part]
        return own[numbers // own.shape[1], numbers % own.shape[1]]

    def gather(self, part: int, block_tables: torch.Tensor) -> torch.Tensor:
        """Copies a part of blocks to a tensor [B, M * rows, dim]. `block_tables` is [B, M], the ids
        of M blocks for each of B sequences."""
        return self._parts[part][block_tables].flatten(1, 2)

"""The weights that blocks attracted, of the sequences of a step that count them, side by side."""

from __future__ import annotations

import numpy as np

from tandem.engine.cache.heavy_hitters import Sums


class BlockSums:
    def __init__(self) -> None:
        self._of_sequences: list[Sums] = []
        self._all: Sums | None = None
        self._size = 0

    def add(self, sums: Sums | None) -> int:
        """Returns where a sequence's sums begin; -1 if it has none."""
        if sums is None:
            return -1
        first, self._size = self._size, self._size + len(sums)
        self._of_sequences.append(sums)
        return first

    def address(self) -> int | None:
        """Returns where all sums lie; None if there are none."""
        if not self._of_sequences:
            return None
        self._all = np.concatenate(self._of_sequences)
        return self._all.ctypes.data

    def put_back(self) -> None:
        """Gives the sequences their sums as they are now."""
        if self._all is not None:
            first = 0
            for sums in self._of_sequences:
                sums[:] = self._all[first : first + len(sums)]
                first += len(sums)

"""Rotary angles for the C++ decoder, by position."""

import torch

from tandem.engine.executor.model import rope_tables
from tandem.models.config.model import ModelConfig
from tandem_kernels.rope import rotary_angles

_ANGLES_MIN = 2048


class AngleTable:
    """Angles of all positions up to twice the furthest one seen: looking them up is faster than
    computing them, and a computed position's bits would depend on those beside it."""

    def __init__(self, config: ModelConfig) -> None:
        self.ropes = list(dict.fromkeys(layer.rope for layer in config.layers))
        cpu = torch.device("cpu")
        self._tables = [rope_tables(rope, config.rope_dim, cpu) for rope in self.ropes]
        self._size = 0
        self.reach(_ANGLES_MIN)

    def reach(self, positions_end: int) -> None:
        """Lets `fields`, addresses of [ropes, positions, rope_dim / 2] each, have the positions
        before `positions_end`."""
        if positions_end <= self._size:
            return
        self._size = 1 << (positions_end - 1).bit_length()
        positions = torch.arange(self._size)
        angles = [rotary_angles(positions, *tables) for tables in self._tables]
        self._cosines, self._sines = (
            torch.stack(tables).contiguous() for tables in zip(*angles, strict=True)
        )
        self.fields = {
            "cosines": self._cosines.data_ptr(),
            "sines": self._sines.data_ptr(),
            "table_floats": self._cosines[0].numel(),
        }

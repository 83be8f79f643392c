"""The spans of a step in the memory of a device, for the kernels of layers with a state."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tandem_kernels.linear_attention import StateSpan

# Arguments of kernels whose alignment changes from step to step (tuning.py).
UNALIGNED = ["first_rows", "num_rows", "first_positions", "slots"]


class DeviceSpans(NamedTuple):
    """StateSpans as int32 tensors [S]. A span of no rows is padding. No tensor is read on the host,
    so a CUDA graph that uses them can be replayed with other contents and the same `max_rows`."""

    first_rows: torch.Tensor
    num_rows: torch.Tensor
    first_positions: torch.Tensor
    slots: torch.Tensor
    max_rows: int  # the largest number of rows

    @classmethod
    def of(cls, spans: Sequence[StateSpan], device: torch.device) -> "DeviceSpans":
        columns = [
            [span.first_row for span in spans],
            [span.num_rows for span in spans],
            [span.first_position for span in spans],
            [span.slot for span in spans],
        ]
        array = torch.tensor(columns, dtype=torch.int32, device=device).view(4, -1)
        first_rows, num_rows, first_positions, slots = array
        max_rows = max((span.num_rows for span in spans), default=0)
        return cls(first_rows, num_rows, first_positions, slots, max_rows)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self[:4]

    def __len__(self) -> int:
        return len(self.slots)

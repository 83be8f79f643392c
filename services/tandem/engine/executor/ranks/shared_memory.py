"""Collectives through memory that the processes of all ranks map.

A rank writes its tensor to its own place in the memory, announces it, waits until all ranks have
announced theirs, and reads them. There are two places for each rank, which are used in turns: a
rank that writes to a place again has waited for all ranks once in between, so they have read it.

The tensors may be on a GPU. They are then copied through the memory, which is slow, and which a
CUDA graph cannot record. This is for ranks that share a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.engine.executor.rank_memory import RankMemory
from tandem.engine.executor.weights.share import Share


class SharedMemoryCollectives:
    """The collectives of one rank."""

    is_recordable = False

    def __init__(
        self, memory: RankMemory, *, splits_inputs: bool = False, splits_experts: bool = False
    ) -> None:
        self.share = Share(memory.rank, memory.num_ranks, splits_inputs, splits_experts)
        self._memory = memory
        self._count = 0  # number of finished exchanges

    def gather(self, x: torch.Tensor, width: int) -> torch.Tensor:
        rows = x.shape[0]
        parts = self.share.parts(width)
        theirs = self._exchange(x, [(rows, len(part)) for part in parts])
        out = x.new_empty(rows, width)
        for part, found in zip(parts, theirs, strict=True):
            out[:, part.start : part.stop] = found
        return out

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self.exchange_equal(x)
        total = first.float()
        for other in others:
            total = total + other
        return total.to(device=x.device, dtype=x.dtype)

    def exchange_equal(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Returns the tensors of all ranks, which have one shape, as views of the memory. They are
        valid until the next exchange but one. Raises RankEnded."""
        return self._exchange(x, [x.shape] * self.share.num_ranks)

    def broadcast(self, x: torch.Tensor) -> None:
        x.copy_(self.exchange_equal(x)[0])

    def least(self, number: int) -> int:
        """Returns the smallest of the ranks' numbers. Raises RankEnded."""
        return int(self.gather(torch.tensor([[number]]), self.share.num_ranks).min())

    def break_up(self) -> None:
        self._memory.break_up()

    def _exchange(self, x: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Returns the tensors of all ranks, whose shapes are `shapes`, as views of the memory."""
        places = [
            self._memory.place(rank, self._count % 2, shape, x.dtype)
            for rank, shape in enumerate(shapes)
        ]
        places[self.share.rank].copy_(x)
        self._memory.meet(self._count)
        self._count += 1
        return places

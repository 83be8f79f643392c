"""How the ranks of a tensor-parallel engine exchange activations (torch and Triton kernels).

All ranks call the same functions in the same order. A call returns when this rank has its result;
on a GPU, when the work is queued on the current stream.
"""

from __future__ import annotations

from typing import Protocol

import torch

from tandem.engine.executor.weights.share import WHOLE, Share


class Collectives(Protocol):
    """The exchange between the ranks, as one of them sees it."""

    share: Share
    is_recordable: bool  # True: a CUDA graph can record the calls

    def gather(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """Returns the ranks' columns side by side, [rows, width], on all ranks. `x` [rows, columns]
        has the columns `share.of(width)` of the result. Raises RankEnded."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the ranks' tensors `x`, which have one shape. The sum has the same
        bits on all ranks. May overwrite `x`. Raises RankEnded."""

    def broadcast(self, x: torch.Tensor) -> None:
        """Copies `x` of rank 0 to `x` of all other ranks. Raises RankEnded."""

    def break_up(self) -> None:
        """Ends all waiting of this rank, because another rank has ended. May be called in any
        thread."""


class Alone:
    """The only rank."""

    share = WHOLE
    is_recordable = True

    def gather(self, x: torch.Tensor, width: int) -> torch.Tensor:
        return x

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def broadcast(self, x: torch.Tensor) -> None:
        pass

    def break_up(self) -> None:
        pass


ALONE = Alone()


def inputs_of(ranks: Collectives, x: torch.Tensor, width: int) -> torch.Tensor:
    """Returns the activations by which this rank's share of a matrix is multiplied. This rank has
    computed `x`, and all ranks together `width` columns."""
    return x if ranks.share.splits_inputs else ranks.gather(x, width)


def whole_of(ranks: Collectives, width: int, share: torch.Tensor) -> torch.Tensor:
    """Returns the whole result [rows, width] of a matrix, of which this rank has computed
    `share`."""
    return ranks.sum(share) if ranks.share.splits_inputs else ranks.gather(share, width)

"""Computes which KV heads each tensor-parallel rank of a worker has.

With 4 KV heads, ranks share the heads of the model like this:

    KV heads    [ head 0 | head 1 | head 2 | head 3 ]
    2 ranks     [ rank 0          | rank 1          ]
    4 ranks     [ rank 0 | rank 1 | rank 2 | rank 3 ]
    8 ranks     [ 0, 1   | 2, 3   | 4, 5   | 6, 7   ]    two ranks have the same head

This module imports no other module of an engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.errors import Incompatible


@dataclass(frozen=True, slots=True)
class RankHeads:
    """The division of `num_heads` KV heads among `num_ranks` ranks. The constructor raises
    Incompatible if neither number divides the other."""

    num_heads: int
    num_ranks: int

    def __post_init__(self) -> None:
        heads, ranks = self.num_heads, self.num_ranks
        if ranks < 1 or (heads % ranks and ranks % heads):
            raise Incompatible(f"tensor_parallel {ranks} does not divide {heads} KV heads")

    @property
    def per_rank(self) -> int:
        """Number of heads that each rank has."""
        return max(1, self.num_heads // self.num_ranks)

    @property
    def replicas(self) -> int:
        """Number of ranks that have the same heads; 1 if every rank has different heads."""
        return max(1, self.num_ranks // self.num_heads)

    def of(self, rank: int) -> range:
        """Returns the indices of the heads that the rank has."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank is {rank}; it must be from 0 to {self.num_ranks - 1}")
        first = rank * self.num_heads // self.num_ranks
        return range(first, first + self.per_rank)

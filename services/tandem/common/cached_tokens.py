"""A prompt's cached tokens by the location of their KV: plain data that is encoded by msgspec."""

from __future__ import annotations

import msgspec


class CachedTokens(msgspec.Struct, frozen=True):
    """Counts of a prompt's first tokens. The parts follow each other in the prompt, in this
    order: first the tiers of the worker, the fastest first, then other workers. The messages of the
    same name in proto/ have the same fields under numbers of their own.
    """

    device: int = 0  # in the KV pool of a worker that serves the request
    host: int = 0  # in that worker's host memory
    disk: int = 0  # on its disk
    store: int = 0  # in the object store that all workers share
    peer: int = 0  # in another worker's pool, from which they were pulled

    @property
    def total(self) -> int:
        return sum(msgspec.structs.astuple(self))

    def first(self, num_tokens: int) -> CachedTokens:
        """Returns the counts of the first `num_tokens` tokens only."""
        parts = []
        left = num_tokens
        for part in msgspec.structs.astuple(self):
            parts.append(min(part, left))
            left -= parts[-1]
        return CachedTokens(*parts)

    def then(self, other: CachedTokens) -> CachedTokens:
        """Returns these counts plus those of `other` for the tokens after them.

        The total is the larger one of both.
        """
        return self + (other - other.first(self.total))

    def __add__(self, other: CachedTokens) -> CachedTokens:
        return CachedTokens(*map(int.__add__, *map(msgspec.structs.astuple, (self, other))))

    def __sub__(self, other: CachedTokens) -> CachedTokens:
        return CachedTokens(*map(int.__sub__, *map(msgspec.structs.astuple, (self, other))))


NONE_CACHED = CachedTokens()

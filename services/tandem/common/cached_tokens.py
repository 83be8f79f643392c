"""A prompt's cached tokens by the location of their KV: plain data that is encoded by msgspec."""

from __future__ import annotations

import msgspec


class CachedTokens(msgspec.Struct, frozen=True):
    """Numbers of a prompt's first tokens by the location of their KV.

    The fields are in the order of the tokens in the prompt: tokens in `device` come first, then
    those in `host`, and so on: the tiers of the worker by speed, then other workers. The messages
    of the same name in proto/ have the same fields under numbers of their own.
    """

    device: int = 0  # tokens in the KV pool of a worker that serves the request
    host: int = 0  # tokens in that worker's host memory
    disk: int = 0  # tokens on that worker's disk
    store: int = 0  # tokens in the object store that all workers share
    peer: int = 0  # tokens pulled from another worker's pool

    @property
    def total(self) -> int:
        return sum(msgspec.structs.astuple(self))

    def first(self, num_tokens: int) -> CachedTokens:
        """Returns the counts for only the first `num_tokens` tokens of the prompt."""
        parts = []
        left = num_tokens
        for part in msgspec.structs.astuple(self):
            parts.append(min(part, left))
            left -= parts[-1]
        return CachedTokens(*parts)

    def then(self, other: CachedTokens) -> CachedTokens:
        """Returns these counts, and those of `other` for the tokens that follow.

        The total is the larger of the two totals.
        """
        return self + (other - other.first(self.total))

    def __add__(self, other: CachedTokens) -> CachedTokens:
        return CachedTokens(*map(int.__add__, *map(msgspec.structs.astuple, (self, other))))

    def __sub__(self, other: CachedTokens) -> CachedTokens:
        return CachedTokens(*map(int.__sub__, *map(msgspec.structs.astuple, (self, other))))


NONE_CACHED = CachedTokens()

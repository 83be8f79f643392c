"""Counts of a prompt's cached tokens, by the place where the KV of the tokens was found. Plain
data, encoded by msgspec."""

from __future__ import annotations

import msgspec


class CachedTokens(msgspec.Struct, frozen=True):
    """Counts of a prompt's cached tokens, by where their KV was found.

    The cached tokens are the first tokens of the prompt, and the fields are in the order of the
    prompt. With device=32 and host=16, the KV of tokens 0 to 31 was in the pool, and the KV of
    tokens 32 to 47 in host memory. The Protobuf messages of this name have the same fields in
    another order.
    """

    device: int = 0  # number of tokens whose KV was in the pool of a worker that serves the request
    host: int = 0  # number of tokens whose KV was loaded from such a worker's host memory
    disk: int = 0  # number of tokens whose KV was loaded from such a worker's disk
    store: int = 0  # number of tokens whose KV was loaded from the object store of all workers
    peer: int = 0  # number of tokens whose KV was pulled from the pool of another worker

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
        """Returns `self` for the tokens that it counts, and `other` for the tokens after these.

        Example: `self` has device=32, so it counts tokens 0 to 31. `other` has device=16 and
        host=48, so it counts tokens 0 to 63. The result is device=32 for tokens 0 to 31 and host=32
        for tokens 32 to 63.
        """
        return self + (other - other.first(self.total))

    def __add__(self, other: CachedTokens) -> CachedTokens:
        return CachedTokens(*map(int.__add__, *map(msgspec.structs.astuple, (self, other))))

    def __sub__(self, other: CachedTokens) -> CachedTokens:
        return CachedTokens(*map(int.__sub__, *map(msgspec.structs.astuple, (self, other))))


NONE_CACHED = CachedTokens()

"""Chains of block hashes."""

from __future__ import annotations

from hashlib import blake2b


def chain(name: str, length: int) -> list[bytes]:
    """Returns `length` hashes that no chain of another name has."""
    return [blake2b(f"{name}/{i}".encode(), digest_size=16).digest() for i in range(length)]

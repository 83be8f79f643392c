"""A LoRA adapter in messages between processes: plain data that is encoded by msgspec.

Clients use the adapter's name. The *digest* identifies the content of the adapter's files. Block
hashes, and everything else that must never confuse two adapters, use the digest, because a name may
later refer to other files.
"""

import msgspec


class Adapter(msgspec.Struct, frozen=True):
    name: str  # name in the API: the `model` of requests
    digest: str  # hash of the adapter's files, ranks and scales, in hex
    path: str  # folder with the adapter's files on the workers
    rank: int  # largest rank of the adapter's modules
    # Time at which the adapter was added, in seconds since 1970. If two adapters have the same
    # name, the one with the later time is used.
    added_at: float = 0.0


NO_ADAPTER = ""  # digest of the base model


def digest_of(adapter: Adapter | None) -> str:
    """Returns the digest by which block hashes identify an adapter; "" for None, the base model."""
    return NO_ADAPTER if adapter is None else adapter.digest

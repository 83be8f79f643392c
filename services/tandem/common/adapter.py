"""A LoRA adapter as processes name it to each other: plain data that travels by msgspec.

The *digest* says what an adapter computes; the name is what clients call it. Block hashes, and
whatever else must never confuse two adapters, take the digest: a name may stand for other files
tomorrow.
"""

import msgspec


class Adapter(msgspec.Struct, frozen=True):
    name: str  # in the API: the `model` of requests
    digest: str  # of its files, in hex; with them of its ranks and scales
    path: str  # its folder, where workers look for it
    rank: int  # the largest of its modules
    # Seconds since 1970. Of two adapters with one name the later one counts.
    added_at: float = 0.0


NO_ADAPTER = ""  # the digest of the base model


def digest_of(adapter: Adapter | None) -> str:
    """Returns what block hashes take of an adapter; None is the base model."""
    return NO_ADAPTER if adapter is None else adapter.digest

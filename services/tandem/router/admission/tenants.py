"""Finds a request's tenant: that of its API key, or of `x-tandem-tenant`, which a gateway sets.

Only a router that was told to trust the header heeds it: a client that could set it itself could
name anybody. A tenant's blocks are hashed under a salt of its own, so that two with the same prompt
share nothing and cannot learn of one another's prompts by timing; requests without a tenant share
among themselves. Clients choose no salt (`cache_salt` is refused).
"""

from collections.abc import Sequence

from tandem.common.block_hash import tenant_salt
from tandem.errors import BadRequest
from tandem.net.security.keys import KeyRecord
from tandem.net.security.limits import NO_LIMITS, Limits

TENANT_HEADER = "x-tandem-tenant"
TENANT_CHARACTERS_MAX = 128


def read_tenant(values: Sequence[str], *, trusted: bool) -> str:
    """Returns the tenant that the header's values name; empty if none. Raises BadRequest."""
    if not trusted or not values:
        return ""
    if len(values) > 1:
        # A gateway that adds its own to a client's must not leave the choice to us.
        raise BadRequest(f"{TENANT_HEADER} was sent {len(values)} times; one is allowed")
    # Only what surrounds a field's value in HTTP (RFC 9110, 5.5) may go: to drop or to fold any
    # other character would give one tenant's request to another.
    tenant = values[0].strip(" \t")
    is_printable = tenant.isascii() and tenant.isprintable()
    if not is_printable or not 1 <= len(tenant) <= TENANT_CHARACTERS_MAX:
        raise BadRequest(
            f"{TENANT_HEADER} must be 1 to {TENANT_CHARACTERS_MAX} printable ASCII characters"
        )
    return tenant


def tenant_of(key: KeyRecord | None, named: Sequence[str], *, trusted: bool) -> str:
    """Returns a request's tenant: that of a trusted header, else the key's, else none."""
    return read_tenant(named, trusted=trusted) or (key.tenant if key else "")


def limits_of(key: KeyRecord | None) -> Limits:
    """Returns the limits of a request: its key's, whoever is its tenant."""
    return key.limits if key else NO_LIMITS


def visible_tenant(key: KeyRecord | None) -> str | None:
    """Returns the tenant whose requests the key's owner may look at; None for all."""
    return key.tenant if key is not None and key.role == "user" else None


def cache_salt(cluster_token: str, tenant: str) -> bytes:
    """Returns the salt of a tenant's block hashes, the same at every router; empty if no tenant.

    The chain's root takes it in with its length, so it can be no other field's ending.
    """
    return tenant_salt(cluster_token.encode(), tenant) if tenant else b""

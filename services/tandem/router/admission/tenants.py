"""Finds a request's tenant, from its API key or from the header that a gateway sets.

The header `x-tandem-tenant` is used only if the router is configured to trust it, because otherwise
a client could name any tenant. The KV blocks of each tenant are hashed with the tenant's own salt.
So two tenants with the same prompt share no KV blocks, and neither can find out by a short TTFT
which prompts the other has sent. Requests without a tenant share blocks among themselves. A client
may divide its tenant's requests further by `cache_salt`, but reaches no other tenant's blocks.
"""

from collections.abc import Sequence

from tandem.common.block_hash import tenant_salt
from tandem.errors import BadRequest
from tandem.net.security.keys import KeyRecord
from tandem.net.security.limits import NO_LIMITS, Limits

TENANT_HEADER = "x-tandem-tenant"
TENANT_CHARACTERS_MAX = 128


def read_tenant(values: Sequence[str], *, trusted: bool) -> str:
    """Returns the tenant in the header's values, or "" if there is none or it is not trusted.

    Raises BadRequest if the header was sent more than once or its value is not a valid name.
    """
    if not trusted or not values:
        return ""
    if len(values) > 1:
        # A gateway may have appended its header to one that the client sent. The router cannot
        # know which of the two to trust.
        raise BadRequest(f"the header {TENANT_HEADER} was sent {len(values)} times; send it once")
    # Strip only spaces and tabs, which HTTP allows around a header's value (RFC 9110, 5.5). A
    # change of any other character could turn the name of one tenant into that of another.
    tenant = values[0].strip(" \t")
    is_printable = tenant.isascii() and tenant.isprintable()
    if not is_printable or not 1 <= len(tenant) <= TENANT_CHARACTERS_MAX:
        raise BadRequest(
            f"the header {TENANT_HEADER} must have 1 to {TENANT_CHARACTERS_MAX} printable ASCII "
            "characters"
        )
    return tenant


def tenant_of(key: KeyRecord | None, named: Sequence[str], *, trusted: bool) -> str:
    """Returns a request's tenant: from a trusted header, else from the API key, else ""."""
    return read_tenant(named, trusted=trusted) or (key.tenant if key else "")


def limits_of(key: KeyRecord | None) -> Limits:
    """Returns the limits of a request's API key. They do not depend on the request's tenant."""
    return key.limits if key else NO_LIMITS


def visible_tenant(key: KeyRecord | None) -> str | None:
    """Returns the tenant whose requests may be seen with this API key; None means all."""
    return key.tenant if key is not None and key.role == "user" else None


def cache_salt(cluster_token: str, tenant: str, own: str = "") -> bytes:
    """Returns the salt of a request's block hashes, the same on every router. `own` is the salt
    that the client sent; "": none. Without a tenant and a salt, the result is b"".

    The hash of a prompt's first block depends on the salt, and the hash of each later block on the
    hash of the block before it.
    """
    salt = tenant_salt(cluster_token.encode(), tenant) if tenant or own else b""
    # The tenant's salt is the key, so that no client can compute the salt of another tenant.
    return tenant_salt(salt, own) if own else salt

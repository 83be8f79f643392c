"""API keys: their text, their records, and which of two records is the newer one. Pure.

A key is `tandem-ID-SECRET`. Its record holds only a SHA-256 of the secret, which has 256 random
bits: no slower hash would make it harder to guess.

    created (version 1) --rotate--> version n+1, the old secret works until `previous_until`
                        --update--> version n+1, with other limits
                        --revoke--> version n+1, a tombstone: the key never works again

The higher version wins wherever two records of a key meet, so an old record that comes back (from a
dump of Redis, or a router that was cut off) brings no key back. For that, tombstones stay until 30
days after the key's expiry, and for ever for a key without one.
"""

import hashlib
import hmac
import secrets
from typing import Literal

import msgspec

from tandem.errors import Unauthenticated
from tandem.net.security.limits import NO_LIMITS, Limits

Role = Literal["user", "operator", "metrics"]

KEY_PREFIX = "tandem"
TOMBSTONE_S = 30 * 24 * 3600.0  # after the key's expiry
_ID_BYTES = 6
_SECRET_BYTES = 32


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A key as it is stored. Times are seconds since the epoch; 0 is never."""

    key_id: str
    version: int
    tenant: str
    role: Role
    digest: str  # SHA-256 of the secret, in hexadecimal
    created_at: float
    expires_at: float = 0.0
    previous_digest: str = ""  # of the secret before the last rotation
    previous_until: float = 0.0
    revoked_at: float = 0.0
    limits: Limits = NO_LIMITS

    def supersedes(self, other: "KeyRecord | None") -> bool:
        """Returns whether this record wins over another of the same key.

        Two changes at once may make the same version: the revocation wins, then the later text.
        """
        return other is None or self._order > other._order

    def state(self, now: float) -> Literal["valid", "expired", "revoked"]:
        if self.revoked_at:
            return "revoked"
        return "expired" if self.expires_at and now >= self.expires_at else "valid"

    def is_forgettable(self, now: float) -> bool:
        """Returns whether no older record of the key could work any more."""
        return bool(self.expires_at) and now >= self.expires_at + TOMBSTONE_S

    @property
    def is_counted(self) -> bool:
        """True if the key's limits need the counts of its tenant."""
        return self.limits.are_counted and not self.revoked_at

    @property
    def _order(self) -> tuple[int, float, str]:
        return (self.version, self.revoked_at, self.digest)


class NewKey(msgspec.Struct, frozen=True):
    """A record and the text of its key, which nobody can read again."""

    text: str
    record: KeyRecord


def create(
    tenant: str, role: Role, *, now: float, expires_at: float = 0.0, limits: Limits = NO_LIMITS
) -> NewKey:
    key_id = secrets.token_hex(_ID_BYTES)
    secret = _new_secret()
    record = KeyRecord(
        key_id=key_id,
        version=1,
        tenant=tenant,
        role=role,
        digest=_digest(secret),
        created_at=now,
        expires_at=expires_at,
        limits=limits,
    )
    return NewKey(_text(key_id, secret), record)


def rotate(record: KeyRecord, *, now: float, grace_s: float) -> NewKey:
    """A new secret for a key. The present one works for another `grace_s` seconds."""
    secret = _new_secret()
    rotated = msgspec.structs.replace(
        record,
        version=record.version + 1,
        digest=_digest(secret),
        previous_digest=record.digest if grace_s else "",
        previous_until=now + grace_s if grace_s else 0.0,
    )
    return NewKey(_text(record.key_id, secret), rotated)


def update(record: KeyRecord, limits: Limits) -> KeyRecord:
    """The record of a key with other limits. Its secrets stay as they are."""
    return msgspec.structs.replace(record, version=record.version + 1, limits=limits)


def revoke(record: KeyRecord, *, now: float) -> KeyRecord:
    """The tombstone of a key. It holds no digest."""
    return msgspec.structs.replace(
        record,
        version=record.version + 1,
        digest="",
        previous_digest="",
        previous_until=0.0,
        revoked_at=now,
    )


def parse_key(text: str) -> tuple[str, str]:
    """The id and the secret of a key. Raises Unauthenticated if the text is no key."""
    prefix, _, rest = text.partition("-")
    key_id, _, secret = rest.partition("-")
    if prefix != KEY_PREFIX or not key_id or not secret:
        raise Unauthenticated(
            f"the API key is not one of this cluster's; a key looks like {KEY_PREFIX}-ID-SECRET"
        )
    return key_id, secret


def check_secret(record: KeyRecord, secret: str, *, now: float) -> None:
    """Raises Unauthenticated unless the secret is the key's and the key is valid.

    Only a sender that knows a secret learns that its key has expired. A revoked key is as unknown.
    """
    given = _digest(secret)
    is_current = hmac.compare_digest(given, record.digest)
    is_previous = hmac.compare_digest(given, record.previous_digest) and now < record.previous_until
    if not (is_current or is_previous):
        raise Unauthenticated("the API key is not one of this cluster's")
    if record.state(now) != "valid":
        raise Unauthenticated("the API key has expired")


def _text(key_id: str, secret: str) -> str:
    return f"{KEY_PREFIX}-{key_id}-{secret}"


def _new_secret() -> str:
    return secrets.token_urlsafe(_SECRET_BYTES)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()

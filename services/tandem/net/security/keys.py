"""API keys: their text, their records, and which of two records is newer. This module does no I/O.

A key is the text `tandem-ID-SECRET`, or a text that an operator chose (`record_of`). The record of
a key has only the SHA-256 of the secret. A generated secret has 256 random bits, so a slower hash
would not make guessing it harder.

A new key has version 1. Each change creates a record with the next version:

  change   effect on the key
  rotate   a new secret; the old secret works until `previous_until`
  update   other limits
  revoke   the key never works again; its record is then called a tombstone

Of two records of a key, the one with the higher version wins. For example, a dump of Redis may
still have version 2 of a key that was revoked with version 3. If the dump is restored, the
tombstone of version 3 wins, and the key stays revoked. Tombstones are therefore kept: for 30 days
after the key's expiry, and forever if the key never expires.
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
TOMBSTONE_S = 30 * 24 * 3600.0  # seconds for which a record is kept after the key has expired
_ID_BYTES = 6
_SECRET_BYTES = 32


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The stored record of a key. Times are in seconds since the epoch; 0 means never."""

    key_id: str
    version: int
    tenant: str
    role: Role
    digest: str  # SHA-256 of the key's secret, hexadecimal
    created_at: float
    expires_at: float = 0.0
    previous_digest: str = ""  # digest of the secret before the last rotation
    previous_until: float = 0.0
    revoked_at: float = 0.0
    limits: Limits = NO_LIMITS

    def supersedes(self, other: "KeyRecord | None") -> bool:
        """Returns True if this record must replace another record of the same key.

        Concurrent changes at two routers may create two records with the same version. If one of
        the two is a tombstone, it wins. Otherwise the record with the higher digest wins. All
        routers therefore keep the same record.
        """
        return other is None or self._order > other._order

    def state(self, now: float) -> Literal["valid", "expired", "revoked"]:
        if self.revoked_at:
            return "revoked"
        return "expired" if self.expires_at and now >= self.expires_at else "valid"

    def is_forgettable(self, now: float) -> bool:
        """Returns True if the record can be deleted: the key expired so long ago that even an older
        record of the key, from a restored dump, would be expired, too."""
        return bool(self.expires_at) and now >= self.expires_at + TOMBSTONE_S

    @property
    def is_counted(self) -> bool:
        """True if the key has a limit on the tenant's usage, so that the usage must be counted."""
        return self.limits.are_counted and not self.revoked_at

    @property
    def _order(self) -> tuple[int, float, str]:
        return (self.version, self.revoked_at, self.digest)


class NewKey(msgspec.Struct, frozen=True):
    """The record of a key, and the text of the key, which includes the secret. The text is not
    stored anywhere."""

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
    """Creates a new secret for a key. The current secret remains valid for `grace_s` seconds."""
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
    """Creates the next version of a record with other limits."""
    return msgspec.structs.replace(record, version=record.version + 1, limits=limits)


def revoke(record: KeyRecord, *, now: float) -> KeyRecord:
    """Creates the tombstone of a key: a revoked record without digests of secrets."""
    return msgspec.structs.replace(
        record,
        version=record.version + 1,
        digest="",
        previous_digest="",
        previous_until=0.0,
        revoked_at=now,
    )


def record_of(text: str, *, now: float) -> KeyRecord:
    """Creates the record of a key whose text an operator chose, such as `sk-my-own-key`. The key
    has the role operator, which allows all calls."""
    key_id, secret = parse_key(text)
    return KeyRecord(
        key_id=key_id,
        version=1,
        tenant="default",
        role="operator",
        digest=_digest(secret),
        created_at=now,
    )


def parse_key(text: str) -> tuple[str, str]:
    """Splits a key `tandem-ID-SECRET` into id and secret. For a key of any other form, the id is
    made from the key's hash, and the secret is the whole key. Raises Unauthenticated if the text is
    empty."""
    prefix, _, rest = text.partition("-")
    key_id, _, secret = rest.partition("-")
    if prefix == KEY_PREFIX and key_id and secret:
        return key_id, secret
    if not text:
        raise Unauthenticated("the API key is empty; send a key of this cluster")
    return f"own{_digest(text)[: 2 * _ID_BYTES]}", text


def check_secret(record: KeyRecord, secret: str, *, now: float) -> None:
    """Raises Unauthenticated unless the secret is correct and the key is valid.

    Only a sender with the correct secret gets the message that the key has expired. The message for
    a revoked key is the same as for an unknown key.
    """
    given = _digest(secret)
    is_current = hmac.compare_digest(given, record.digest)
    is_previous = hmac.compare_digest(given, record.previous_digest) and now < record.previous_until
    if not (is_current or is_previous):
        raise Unauthenticated("the API key does not belong to this cluster")
    if record.state(now) != "valid":
        raise Unauthenticated("the API key has expired")


def _text(key_id: str, secret: str) -> str:
    return f"{KEY_PREFIX}-{key_id}-{secret}"


def _new_secret() -> str:
    return secrets.token_urlsafe(_SECRET_BYTES)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()

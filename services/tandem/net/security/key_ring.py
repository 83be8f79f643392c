"""The API keys that one router has, and authentication with them.

Key records come from Redis, from other routers and from a file. The key ring keeps the newest
record of each key. A router that cannot reach Redis continues with the keys in the ring. So the
ring also stores when it was last in sync with Redis.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from tandem.errors import KeysUnknown, Unauthenticated
from tandem.net.security.keys import KeyRecord, check_secret, parse_key


class KeyRing:
    """The key records that a router has, by key id. `synced_at` is the time of the last sync with
    Redis, in seconds since the epoch, or None if the keys were never read."""

    def __init__(self, *, age_max_s: float = 0.0) -> None:
        """All keys are refused if the last sync with Redis was more than `age_max_s` seconds ago.
        With 0, there is no such limit."""
        self._records: dict[str, KeyRecord] = {}
        self._age_max_s = age_max_s
        self.synced_at: float | None = None
        self._limited: frozenset[str] = frozenset()

    @property
    def records(self) -> Mapping[str, KeyRecord]:
        return MappingProxyType(self._records)

    def merge(self, records: Iterable[KeyRecord], *, now: float) -> list[KeyRecord]:
        """Merges `records` into the ring, which keeps the newest record of each key. Returns the
        ring's record of each key for which `records` has an older record."""
        behind = []
        for record in records:
            known = self._records.get(record.key_id)
            if record.supersedes(known):
                if not record.is_forgettable(now):
                    self._records[record.key_id] = record
            elif known is not None and known.supersedes(record):
                behind.append(known)
        for key_id in [k for k, r in self._records.items() if r.is_forgettable(now)]:
            del self._records[key_id]
        self._limited = frozenset(r.tenant for r in self._records.values() if r.is_counted)
        return behind

    def is_limited(self, tenant: str) -> bool:
        """Returns True if a key of the tenant has a limit on the tenant's usage, so that the usage
        must be counted."""
        return tenant in self._limited

    def authenticate(self, bearer: str, *, now: float) -> KeyRecord:
        """Returns the record of the API key `bearer`. Raises Unauthenticated if the key is not
        valid, and KeysUnknown if the ring's keys are too old."""
        self.check_fresh(now)
        key_id, secret = parse_key(bearer)
        record = self._records.get(key_id)
        if record is None:
            raise Unauthenticated("the API key does not belong to this cluster")
        check_secret(record, secret, now=now)
        return record

    def check_fresh(self, now: float) -> None:
        """Raises KeysUnknown if the keys were never read, or if the last sync with Redis was more
        than `age_max_s` seconds ago."""
        if self.synced_at is None:
            raise KeysUnknown(
                "this router has not read the API keys yet; try again", retry_after_s=1.0
            )
        if self._age_max_s and now - self.synced_at > self._age_max_s:
            raise KeysUnknown(
                f"this router last read the API keys {now - self.synced_at:.0f} s ago, which is "
                "too long ago; try again",
                retry_after_s=1.0,
            )

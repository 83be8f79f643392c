"""The keys that one router knows, and the answer to "whose request is this?". Pure.

A ring never forgets a version: whatever Redis, another router or a file tells it is merged, and the
newer record of each key stays. It remembers when it last learned the whole truth, because a router
that is cut off goes on with the keys that it has.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from tandem.errors import KeysUnknown, Unauthenticated
from tandem.net.security.keys import KeyRecord, check_secret, parse_key


class KeyRing:
    """Records by key id. `synced_at` is None until all keys were read once."""

    def __init__(self, *, age_max_s: float = 0.0) -> None:
        """`age_max_s`: keys not confirmed for so many seconds are refused; 0 for never."""
        self._records: dict[str, KeyRecord] = {}
        self._age_max_s = age_max_s
        self.synced_at: float | None = None
        self._limited: frozenset[str] = frozenset()

    @property
    def records(self) -> Mapping[str, KeyRecord]:
        return MappingProxyType(self._records)

    def merge(self, records: Iterable[KeyRecord], *, now: float) -> list[KeyRecord]:
        """Takes newer records in. Returns the ring's own records that are newer than given ones."""
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
        """Returns whether any key of the tenant has limits that need its counts."""
        return tenant in self._limited

    def authenticate(self, bearer: str, *, now: float) -> KeyRecord:
        """Returns the record of a key. Raises Unauthenticated, KeysUnknown."""
        self.check_fresh(now)
        key_id, secret = parse_key(bearer)
        record = self._records.get(key_id)
        if record is None:
            raise Unauthenticated("the API key is not one of this cluster's")
        check_secret(record, secret, now=now)
        return record

    def check_fresh(self, now: float) -> None:
        """Raises KeysUnknown while no key was ever read, or for too long."""
        if self.synced_at is None:
            raise KeysUnknown(
                "this router has not read the API keys yet; try again", retry_after_s=1.0
            )
        if self._age_max_s and now - self.synced_at > self._age_max_s:
            raise KeysUnknown(
                f"this router could not read the API keys for {now - self.synced_at:.0f} s; "
                "try again",
                retry_after_s=1.0,
            )

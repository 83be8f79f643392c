"""Keeps a router's API keys up to date, and changes keys when operators request it.

Key records are copied between four places. The ring is the router's copy in memory (key_ring.py):

  from                           to      when
  Redis                          ring    within a second of a change, and every REREAD_S seconds
  file (a Kubernetes Secret)     ring    when the file has changed
  another router's signed call   ring    when an operator changes a key at that router
  ring                           Redis   when a record in Redis is missing or older

If a key is revoked while Redis is unreachable, the revocation is written to Redis later. If an old
dump of Redis is restored, a revoked key stays revoked. When an operator changes a key at one
router, this router also sends the new record to every other known router.

Routers sign the calls that send records. The secret for the signature is derived from the cluster's
token and from the routers' user and password in Redis. A worker has the token but another Redis
user, so a worker cannot sign.
"""

import asyncio
import hashlib
import hmac
import logging
import ssl
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tandem.common.config.cluster import ClusterConfig
from tandem.common.process.ticks import sleep_until_tick
from tandem.errors import ConfigError, KeyNotFound, KeysUnknown, NotNow, Unauthenticated
from tandem.net.rpc.certificates import CertificateFiles
from tandem.net.security import keys
from tandem.net.security.key_ring import KeyRing
from tandem.net.security.key_store import KeyStore
from tandem.net.security.keys import KeyRecord, NewKey, Role
from tandem.net.security.limits import NO_LIMITS, Limits, changed
from tandem.net.store.client import UNREACHABLE, UNREADABLE, Client
from tandem.net.store.router_registry import RouterRegistry
from tandem.net.store.url import parse

log = logging.getLogger(__name__)

REFRESH_S = 1.0
# All keys are read again after this many seconds, even if the change counter in Redis is unchanged.
# A restored dump of Redis may have the same counter and other keys.
REREAD_S = 60.0
RECORDS_PATH = "/v1/keys/records"
SIGNATURE_HEADER = "x-tandem-signature"
CALL_DEADLINE_S = 1.5


class Revocation(msgspec.Struct, frozen=True):
    """The result of a revocation. `redis` is empty if the revocation was written to Redis.
    Otherwise it is the reason why not. `routers` maps the id of each router to "" if the router
    confirmed the revocation, or else to the reason why not."""

    key_id: str
    redis: str
    routers: dict[str, str]


class KeyService:
    """Reads and changes the keys of one router. `run` keeps the ring up to date."""

    def __init__(
        self,
        redis: Client,
        cluster: ClusterConfig,
        ring: KeyRing,
        *,
        router_id: str,
        file: str,
        tls: CertificateFiles | None = None,
    ) -> None:
        """`tls` is the certificate that all routers share, if they use TLS."""
        self._tls = tls
        self.ring = ring
        self._secret = _routers_secret(cluster)
        self._store = KeyStore(redis, cluster.cluster_id)
        self._registry = RouterRegistry(redis, cluster.cluster_id)
        self._router_id = router_id
        self._file = Path(file) if file else None
        self._file_time = 0.0
        self._routers: dict[str, str] = {}
        self._changes = b""
        # True: the next refresh must read all records, because records in Redis and in the ring may
        # differ although the change counter is unchanged.
        self._is_behind = True
        self._read_at = 0.0
        self._is_away = False

    async def run(self, own_url: str) -> None:
        """Refreshes the ring every second until the call is cancelled. Then removes this router
        from the registry of routers."""
        try:
            while True:
                await self.refresh(own_url)
                await sleep_until_tick(REFRESH_S)
        finally:
            try:
                await self._registry.remove(self._router_id)
            except UNREACHABLE:
                log.info(
                    "Redis does not answer, so this router cannot remove its record from Redis; "
                    "other routers remove it after an hour"
                )

    async def refresh(self, own_url: str) -> None:
        """Reads changed keys from the file and from Redis, and registers this router with the URL
        `own_url`. If `own_url` is empty, this router is not registered, so other routers do not
        send changed keys to it. Raises ConfigError if the file of keys cannot be read."""
        now = time.time()
        self._read_file(now)
        try:
            if own_url:
                self._routers, value = await self._registry.announce(
                    self._router_id, own_url, self._store.changes_key
                )
                changes = value or b""
            else:
                changes = await self._store.num_changes()
            is_lost = not changes and bool(self.ring.records)
            is_due = is_lost or now - self._read_at > REREAD_S
            if self._is_behind or is_due or changes != self._changes:
                self._is_behind = False
                await self._reconcile(now)
                # `changes` was read before the records. If a key was changed in between, the
                # counter is now higher, and the next refresh reads the records again.
                self._changes = changes
                self._read_at = now
        except UNREACHABLE as error:
            if not self._is_away:
                log.warning(
                    "API keys cannot be read from Redis (%r); the known keys stay in use", error
                )
            self._is_away = self._is_behind = True
        else:
            self._is_away = False
            self.ring.synced_at = now

    async def create(
        self, tenant: str, role: Role, *, expires_at: float = 0.0, limits: Limits = NO_LIMITS
    ) -> NewKey:
        """Creates a key. Raises KeysUnknown while Redis is unreachable, because all routers must
        know the key."""
        key = keys.create(tenant, role, now=time.time(), expires_at=expires_at, limits=limits)
        await self._write(key.record)
        return key

    async def rotate(self, key_id: str, *, grace_s: float) -> NewKey:
        """Gives a key a new secret. The old secret remains valid for `grace_s` seconds. Raises
        KeyNotFound, KeysUnknown, and NotNow if the key is revoked or was changed at the same
        time."""
        record = self._find(key_id)
        if record.revoked_at:
            raise NotNow(f"the key {key_id} is revoked; create another one")
        key = keys.rotate(record, now=time.time(), grace_s=grace_s)
        await self._write(key.record)
        return key

    async def update(self, key_id: str, changes: dict[str, Any]) -> KeyRecord:
        """Changes some limits of a key. Raises the errors of `rotate`, and BadRequest for invalid
        limits."""
        record = self._find(key_id)
        if record.revoked_at:
            raise NotNow(f"the key {key_id} is revoked; create another one")
        updated = keys.update(record, changed(record.limits, changes))
        await self._write(updated)
        return updated

    async def revoke(self, key_id: str) -> Revocation:
        """Revokes a key in this router, in Redis and in all known routers. Raises KeyNotFound."""
        record = self._find(key_id)
        tombstone = record if record.revoked_at else keys.revoke(record, now=time.time())
        self.ring.merge([tombstone], now=time.time())
        sending = asyncio.gather(
            *(self._send_record(url, tombstone) for url in self._others.values())
        )
        try:
            await self._store.put(tombstone)
            redis = ""
        except UNREACHABLE as error:
            self._is_behind = True
            redis = (
                "Redis does not answer; this router writes the revocation when Redis answers "
                f"again: {error!r}"
            )
        routers = dict(zip(self._others, await sending, strict=True))
        return Revocation(key_id, redis, {self._router_id: "", **routers})

    def take(self, body: bytes, signature: str) -> list[KeyRecord]:
        """Merges the records that another router sent in `body` into the ring. Returns the records
        that the ring did not have yet. Raises Unauthenticated for a wrong signature, and
        KeysUnknown if the records cannot be decoded."""
        if not hmac.compare_digest(self._sign(body).encode(), signature.encode()):
            raise Unauthenticated("the API key records are not signed by a router of this cluster")
        try:
            records = msgspec.json.decode(body, type=list[KeyRecord])
        except UNREADABLE as error:
            raise KeysUnknown(
                "the API key records are from a router with another version of Tandem; run the "
                f"same version on all routers: {error}"
            ) from None
        self.ring.merge(records, now=time.time())
        # The router that sent the records may have failed to write them to Redis. So the next
        # refresh compares the ring with Redis.
        self._is_behind = True
        return [record for record in records if self.ring.records.get(record.key_id) is record]

    @property
    def num_routers(self) -> int:
        """The number of known routers, including this one."""
        return max(1, len(self._routers))

    @property
    def _others(self) -> dict[str, str]:
        return {i: url for i, url in self._routers.items() if i != self._router_id}

    def _find(self, key_id: str) -> KeyRecord:
        if (record := self.ring.records.get(key_id)) is None:
            raise KeyNotFound(
                f"there is no key {key_id[:80]!r}. `tandem keys list` shows the existing keys"
            )
        return record

    async def _write(self, record: KeyRecord) -> None:
        try:
            written = await self._store.put(record)
        except UNREACHABLE as error:
            raise KeysUnknown(
                f"Redis does not answer ({error!r}), so the key cannot be saved; try again",
                retry_after_s=REFRESH_S,
            ) from error
        if not written:
            raise NotNow(
                f"the key {record.key_id} was changed by another call at the same time; check it "
                "with `tandem keys list` and try again"
            )
        self.ring.merge([record], now=time.time())
        await asyncio.gather(*(self._send_record(url, record) for url in self._others.values()))

    async def _send_record(self, url: str, record: KeyRecord) -> str:
        """Sends a record to another router. Returns "" if the router confirmed the record.
        Otherwise returns the reason why it did not."""
        body = msgspec.json.encode([record])
        headers = {SIGNATURE_HEADER: self._sign(body), "content-type": "application/json"}
        try:
            async with httpx.AsyncClient(
                timeout=CALL_DEADLINE_S, trust_env=False, verify=self._verify()
            ) as client:
                reply = await client.post(url + RECORDS_PATH, content=body, headers=headers)
        except httpx.HTTPError as error:
            return f"{url} does not answer: {error!r}"
        return "" if reply.is_success else f"{url} answers {reply.status_code}: {reply.text[:200]}"

    def _verify(self) -> ssl.SSLContext | bool:
        """Returns the TLS settings for calls to other routers. All routers have the same
        certificate, so only this router's own certificate is trusted. The host name is not checked,
        because the certificate does not name the addresses of routers."""
        if self._tls is None:
            return True
        own, end, _ = self._tls.current().chain.decode().partition("-----END CERTIFICATE-----")
        context = ssl.create_default_context(cadata=own + end + "\n")
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.check_hostname = False
        return context

    async def _reconcile(self, now: float) -> None:
        """Merges the records in Redis into the ring. Then writes the ring's records to Redis that
        are missing or older in Redis."""
        found = await self._store.read()
        behind = self.ring.merge(found, now=now)
        in_redis = {record.key_id for record in found}
        behind += [r for key_id, r in self.ring.records.items() if key_id not in in_redis]
        for record in behind:
            await self._store.put(record)
        if old := [r.key_id for r in found if r.is_forgettable(now)]:
            await self._store.forget(old)

    def _read_file(self, now: float) -> None:
        if self._file is None:
            return
        try:
            changed_at = self._file.stat().st_mtime
            if changed_at == self._file_time:
                return
            records = msgspec.json.decode(self._file.read_bytes(), type=list[KeyRecord])
        except (OSError, *UNREADABLE) as error:
            # An error is not fatal if the file was read before: the file may be in the middle of
            # being replaced.
            if self._file_time:
                log.warning(
                    "the file of API keys cannot be read (%s); the known keys stay in use", error
                )
                return
            raise ConfigError(f"the keys file {self._file} cannot be read: {error}") from None
        self.ring.merge(records, now=now)
        self._file_time = changed_at
        self.ring.synced_at = self.ring.synced_at or now

    def _sign(self, body: bytes) -> str:
        return hmac.new(self._secret, b"tandem keys" + body, hashlib.sha256).hexdigest()


def _routers_secret(cluster: ClusterConfig) -> bytes:
    """Derives the secret with which routers sign calls to each other. Workers cannot derive this
    secret, because they do not know the routers' user and password in Redis."""
    options = parse(cluster.redis_url).options
    user = f"tandem routers\0{options.get('username') or ''}\0{options.get('password') or ''}"
    return hmac.digest(cluster.token.encode(), user.encode(), "sha256")


def listed(records: Sequence[KeyRecord], now: float) -> list[dict[str, object]]:
    """Formats key records for an operator. The result contains no digests of secrets."""
    shown = ("key_id", "tenant", "role", "version", "created_at", "expires_at", "revoked_at")
    return [
        {name: getattr(r, name) for name in shown}
        | {"state": r.state(now), "limits": msgspec.to_builtins(r.limits)}
        for r in sorted(records, key=lambda r: (r.tenant, r.created_at))
    ]

"""Which workers there are, as this router sees them: records in Redis, streams, reported load.

    record seen, ready, same model            -> may be chosen, if decode once its stream is up
    record expired while Redis is well        -> gone; its stream is closed when no request is on it
    Redis lost, or back or emptied for less than a TTL
                                              -> the last table stands; a stream that is up is alive

A record's epoch changes whenever a worker publishes its blocks again; only another process
(address, pid, start) is another connection. Places nothing and knows no request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Literal

from services.config import ClusterConfig
from services.redis_client import UNREACHABLE, Client
from services.registry import Contract, Load, Registry, WorkerRecord
from services.router.placement import WorkerSnapshot
from services.router.pools import read_pools
from services.router.worker_client import WorkerClient

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5


@dataclass(slots=True)
class KnownWorker:
    """A worker of the table. Only decode workers have a client."""

    record: WorkerRecord
    client: WorkerClient | None = None
    # Prefill tokens that this router sent there since the record was written.
    tokens_unreported: int = 0
    leases_unreported: int = 0
    sent_at: float = 0.0  # monotonic seconds, when the last of them was

    @property
    def load(self) -> Load:
        """The newer of what its stream and its record say."""
        told = self.client.load if self.client is not None else None
        return told if told is not None and told.step >= self.record.load.step else self.record.load

    def snapshot(self, *, compatible: bool) -> WorkerSnapshot:
        load = self.load
        client = self.client
        waiting = client.num_unreported if client else 0
        tokens = client.tokens_unreported if client else self.tokens_unreported
        return WorkerSnapshot(
            worker_id=self.record.worker_id,
            epoch=self.record.epoch,
            address=self.record.address,
            role=self.record.role,
            state=self.record.state,
            reachable=compatible and (self.record.role != "decode" or _is_up(client)),
            num_running=load.num_running,
            num_waiting=load.num_waiting + waiting,
            queued_tokens=load.queued_tokens + tokens,
            num_leases=load.num_leases + self.leases_unreported,
            blocks_total=load.blocks_total,
            blocks_used=load.blocks_used,
            rates=self.record.rates,
            pairs=self.record.pairs,
        )


@dataclass(slots=True)
class ClusterView:
    """`run` keeps it; everybody else only reads."""

    cluster: ClusterConfig
    redis: Client
    model_fingerprint: str = ""  # empty until the model is loaded: then nothing is compatible
    redis_state: Literal["unknown", "ok", "lost"] = "unknown"
    pools_json: bytes | None = None  # as the pool controller wrote it
    _workers: dict[str, KnownWorker] = field(default_factory=dict)
    _leaving: list[WorkerClient] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _data_set: bytes = b""
    _trusted_from: float = 0.0  # monotonic seconds: until then Redis may not know all workers yet

    async def run(self) -> None:
        """Polls until cancelled; then closes every stream."""
        registry = Registry(self.redis, self.cluster)
        try:
            while True:
                try:
                    await self._poll(registry)
                except UNREACHABLE as error:
                    self._lose_redis(error)
                await asyncio.sleep(POLL_INTERVAL_S)
        finally:
            clients = [w.client for w in self._workers.values() if w.client] + self._leaving
            await asyncio.gather(*(c.close() for c in clients))

    def snapshots(self) -> list[WorkerSnapshot]:
        return [w.snapshot(compatible=self.is_compatible(w.record)) for w in self._workers.values()]

    def has_decode_worker(self, refused: frozenset[str] = frozenset()) -> bool:
        """Whether a request could be placed now, on a worker whose epoch is not in `refused`."""
        return any(
            w.usable and w.role == "decode" and w.epoch not in refused for w in self.snapshots()
        )

    def known(self) -> list[KnownWorker]:
        return list(self._workers.values())

    def client(self, worker_id: str) -> WorkerClient | None:
        worker = self._workers.get(worker_id)
        return worker.client if worker else None

    def note_prefill(self, worker_id: str, num_tokens: int) -> None:
        """Counts work sent to a prefill worker until its next record shows it."""
        if worker := self._workers.get(worker_id):
            worker.tokens_unreported += num_tokens
            worker.leases_unreported += 1
            worker.sent_at = time.monotonic()

    def contract(self) -> Contract | None:
        """What blocks are hashed under; None while no compatible worker is known."""
        records = (w.record for w in self._workers.values())
        return next((r.contract for r in records if self.is_compatible(r)), None)

    def max_model_len(self) -> int | None:
        """The shortest context among compatible workers; None while there are none."""
        records = [w.record for w in self._workers.values()]
        return min((r.max_model_len for r in records if self.is_compatible(r)), default=None)

    def pool_tokens(self) -> int | None:
        """Tokens that the smallest KV pool of a decode worker holds; None while none is known."""
        workers = [w for w in self._workers.values() if w.record.role == "decode"]
        sizes = [
            w.load.blocks_total * w.record.contract.block_size
            for w in workers
            if self.is_compatible(w.record)
        ]
        return min((size for size in sizes if size), default=None)

    def is_compatible(self, record: WorkerRecord) -> bool:
        return record.contract.model_fingerprint == self.model_fingerprint

    async def wait_change(self) -> None:
        """Returns when a worker came, went, or changed its state or connection."""
        changed = self._changed
        await changed.wait()

    def tell_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _poll(self, registry: Registry) -> None:
        records = await registry.read()
        data_set = await registry.data_set()
        self.pools_json = await read_pools(self.redis, self.cluster.cluster_id)
        now = time.monotonic()
        if self.redis_state != "ok" or data_set != self._data_set:
            if self.redis_state == "lost":
                log.info("Redis answers again")
            self.redis_state, self._data_set = "ok", data_set
            self._trusted_from = now + self.cluster.record_ttl_s
        self._merge({r.worker_id: r for r in records}, complete=now >= self._trusted_from)

    def _merge(self, records: dict[str, WorkerRecord], *, complete: bool) -> None:
        changed = False
        for worker_id, record in records.items():
            changed |= self._merge_one(worker_id, record)
        for worker_id in [w for w in self._workers if w not in records]:
            worker = self._workers[worker_id]
            if complete or not _is_up(worker.client):
                log.warning("worker %s is gone: it left, or its record expired", worker_id)
                self._drop(worker_id)
                changed = True
        for client in [c for c in self._leaving if not c.num_inflight]:
            self._leaving.remove(client)
            # Closing is bounded; the view must not wait for it.
            asyncio.create_task(client.close())  # noqa: RUF006
        if changed:
            self.tell_change()

    def _merge_one(self, worker_id: str, record: WorkerRecord) -> bool:
        """Takes a record in. True when something changed that a waiting request may care about."""
        known = self._workers.get(worker_id)
        if known is not None and _process(known.record) != _process(record):
            log.info("worker %s is another process now, at %s", worker_id, record.address)
            self._drop(worker_id)
            known = None
        if known is None:
            known = self._workers[worker_id] = KnownWorker(record)
            self._report_incompatible(record)
            changed = True
        else:
            changed = (known.record.state, known.record.role) != (record.state, record.role)
            # What never reached the worker never changes its load either: it is forgotten in time.
            settled = time.monotonic() - known.sent_at > 2 * self.cluster.record_interval_s
            if settled or known.record.load != record.load:
                known.tokens_unreported = known.leases_unreported = 0
            known.record = record
        if record.role == "decode" and known.client is None:
            known.client = WorkerClient(
                worker_id, record.address, self.cluster.token, on_change=self.tell_change
            )
        return changed

    def _drop(self, worker_id: str) -> None:
        worker = self._workers.pop(worker_id)
        if worker.client is not None:
            self._leaving.append(worker.client)

    def _lose_redis(self, error: BaseException) -> None:
        if self.redis_state != "lost":
            log.warning("Redis is lost, the last known workers stand: %r", error)
        self.redis_state = "lost"

    def _report_incompatible(self, record: WorkerRecord) -> None:
        theirs = record.contract.model_fingerprint
        if not self.model_fingerprint or theirs == self.model_fingerprint:
            return
        log.error(
            "worker %s serves another model than this router: its fingerprint is %s (%s), ours %s; "
            "it gets no requests",
            record.worker_id,
            theirs,
            record.model,
            self.model_fingerprint,
        )


def _is_up(client: WorkerClient | None) -> bool:
    return client is not None and client.is_up


def _process(record: WorkerRecord) -> tuple[str, str, int, float]:
    return record.address, record.host, record.pid, record.started_at

"""The workers as this router sees them: records in Redis, streams, reported load.

    record seen, ready, same model            -> may be chosen, if decode once its stream is up
    record expired while Redis is well        -> gone; its stream is closed when no request is on it
    Redis lost, or back or emptied for less than a TTL, or this process stood still
                                              -> the last table stands; a stream that is up is alive

A record's epoch changes whenever a worker publishes its blocks again; only another process
(address, pid, start) is another connection. Places nothing and knows no request.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from tandem.common.adapter import Adapter
from tandem.common.config.cluster import ClusterConfig
from tandem.common.perf_model.kv_load import longest_sequence
from tandem.common.perf_model.predict import Prefill
from tandem.net.rpc.peer_calls import PeerCalls
from tandem.net.store.client import UNREACHABLE, Client
from tandem.net.store.registry import KvCompatibility, Registry, WorkerRecord
from tandem.net.store.silence import Silences
from tandem.router.autoscaler.policy import ScalingDecision
from tandem.router.placement.choose import Roster, WorkerSnapshot
from tandem.router.placement.shares import Shares
from tandem.router.workers.client import WorkerClient
from tandem.router.workers.control_watch import ControlWatch
from tandem.router.workers.events import EventLog
from tandem.router.workers.known_worker import KnownWorker
from tandem.router.workers.loading import LoadingNow, LoadingWorkers
from tandem.router.workers.pool_watch import PoolWatch
from tandem.router.workers.pools import read_control
from tandem.router.workers.problem_watch import ProblemWatch
from tandem.router.workers.rows import Gone, Seen, worker_rows
from tandem.router.workers.troubles import clock_of_router

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
_NOTE_INTERVAL_S = 0.9
_AFTER_BUG_S = 30.0
_GONE_KEPT_S = 900.0
_GONE_MAX = 64


@dataclass(slots=True)
class ClusterView:
    """The workers that a router knows. `run` updates them; `listen` tells others of changes."""

    cluster: ClusterConfig
    redis: Client
    tls_dir: str = ""
    model_fingerprint: str = ""  # empty until the model is loaded: then nothing is compatible
    redis_state: Literal["unknown", "ok", "lost"] = "unknown"
    pools_json: bytes | None = None  # as the pool controller wrote it
    pool_watch: PoolWatch = field(default_factory=PoolWatch)
    decisions: list[ScalingDecision] = field(
        default_factory=list
    )  # of the autoscaler, the last ones
    calls: PeerCalls = field(init=False)
    _listeners: list[Callable[[], None]] = field(default_factory=list)
    _workers: dict[str, KnownWorker] = field(default_factory=dict)
    _roster: Roster = field(default_factory=Roster)
    _shares: Shares = field(default_factory=Shares)  # of the prefill that this router gave out
    _made_at: float = field(default_factory=time.monotonic)
    _stale: set[str] = field(default_factory=set)  # ids whose snapshot in the roster is old
    _noted_at: float = 0.0  # monotonic seconds, when the problems were noted last
    _read_at: float = 0.0  # monotonic seconds, when the records were read last
    _leaving: list[WorkerClient] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _adapters: dict[str, Adapter] = field(default_factory=dict)
    gone: dict[str, Gone] = field(default_factory=dict)  # of late, until they are back
    _loading: LoadingWorkers = field(default_factory=LoadingWorkers)
    events: EventLog = field(init=False)
    control: ControlWatch = field(default_factory=ControlWatch)
    problems: ProblemWatch = field(init=False)
    _silences: Silences = field(init=False)
    _data_set: bytes = b""
    _trusted_from: float = 0.0  # monotonic seconds: until then Redis may not know all workers yet

    def __post_init__(self) -> None:
        self.calls = PeerCalls(self.cluster.cluster_id, self.cluster.token, self.tls_dir)
        self._silences = Silences(self.cluster)
        self.events = EventLog(self.redis, self.cluster.cluster_id)
        self.problems = ProblemWatch(self.events)

    async def run(self) -> None:
        """Polls until cancelled; then closes every stream."""
        registry = Registry(self.redis, self.cluster)
        try:
            while True:
                try:
                    await self._poll(registry)
                except UNREACHABLE as error:
                    self._lose_redis(error)
                try:
                    self._note_problems()
                except Exception:
                    log.exception("what is wrong cannot be told; requests are served all the same")
                    self._noted_at += _AFTER_BUG_S
                await asyncio.sleep(POLL_INTERVAL_S)
        finally:
            clients = [w.client for w in self._workers.values() if w.client] + self._leaving
            await asyncio.gather(*(c.close() for c in clients))

    def roster(self) -> Roster:
        """Returns all workers as of now; a snapshot is made anew only after a change there."""
        now_s = time.monotonic() - self._made_at
        if self._shares.rebase(now_s):
            self._roster = Roster()
            self._stale.update(self._workers)
        for worker_id in self._stale:
            worker = self._workers[worker_id]
            compatible = self.is_compatible(worker.record)
            placed = self._shares.placed(worker_id)
            self._roster.put(worker.snapshot(compatible=compatible, placed=placed))
        self._stale.clear()
        self._roster.second = self._shares.second(now_s)
        return self._roster

    def listen(self, listener: Callable[[], None]) -> None:
        """Calls `listener` from now on whenever a worker's load was told or changed here."""
        self._listeners.append(listener)

    def _tell_news(self) -> None:
        for listener in self._listeners:
            listener()

    def snapshots(self) -> list[WorkerSnapshot]:
        return list(self.roster().by_id.values())

    def has_decode_worker(self, refused: frozenset[str] = frozenset()) -> bool:
        """Returns whether a request can go now to a worker whose epoch is not in `refused`."""
        return any(
            w.usable and w.role == "decode" and w.epoch not in refused for w in self.snapshots()
        )

    def known(self) -> list[KnownWorker]:
        return list(self._workers.values())

    def seen(self) -> list[Seen]:
        """Returns all workers with a record, as they are shown to operators. A router that does not
        know its model yet, or connects to a worker for the first time, has nothing to tell."""
        return [
            Seen(
                worker.record,
                not self.model_fingerprint or self.is_compatible(worker.record),
                worker.record.role != "decode" or worker.is_up or not worker.why_down,
                self._silences.silent_s(worker_id),
                self._silences.stuck_s(worker_id),
                (worker.load.num_running + worker.load.num_waiting, worker.load.num_leases),
                worker.why_down,
                worker.clock_ahead_s,
            )
            for worker_id, worker in self._workers.items()
        ]

    @property
    def loading(self) -> dict[str, LoadingNow]:
        """Workers that load their model and have no record yet."""
        return self._loading.now(time.monotonic(), self.cluster.record_ttl_s)

    def cluster_problems(self) -> dict[str, str]:
        """Returns a phrase for each part that is not well; workers and Redis are left out."""
        found = self.control.problems | self.pool_watch.problems
        ahead_s = clock_of_router([w.clock_ahead_s for w in self._workers.values()])
        if ahead_s:
            way = "behind" if ahead_s > 0 else "ahead of"
            found["clock"] = f"this router's clock is {abs(ahead_s):.0f} s {way} the workers'"
        return found

    def _note_problems(self) -> None:
        if (now := time.monotonic()) - self._noted_at < _NOTE_INTERVAL_S:
            return
        self._noted_at = now
        pools = self.pool_watch.states([w.record for w in self._workers.values()], self.pools_json)
        rows = worker_rows(self.seen(), self.gone, pools, time.time(), self.loading)
        self.pool_watch.note(pools, rows, now)
        self.problems.note(rows, pools, self.cluster_problems())

    def client(self, worker_id: str) -> WorkerClient | None:
        worker = self._workers.get(worker_id)
        return worker.client if worker else None

    def note_prefill(self, worker_id: str, prefill: Prefill) -> float:
        """Counts work sent to a prefill worker until its next record shows it; returns the time."""
        now = time.monotonic()
        if worker := self._workers.get(worker_id):
            worker.note_prefill(prefill, now, forgotten_before=self._forgotten_before(now))
            self._stale.add(worker_id)
        return now

    def note_prefilled(
        self, worker_id: str, prefill: Prefill, sent_at: float, *, by_it: bool
    ) -> None:
        """Notes that work sent there at `sent_at` waits no more; `by_it`: that worker did it."""
        if worker := self._workers.get(worker_id):
            worker.note_prefilled(prefill, sent_at, by_it=by_it)
            self._stale.add(worker_id)
            self._tell_news()

    def note_share(self, worker_id: str, prefill_s: float) -> None:
        """Adds a prompt that takes `prefill_s` seconds there to the worker's share."""
        if worker_id in self._workers:
            self._shares.sent(worker_id, prefill_s, time.monotonic() - self._made_at)
            self._stale.add(worker_id)

    def compatibility(self) -> KvCompatibility | None:
        """KV compatibility that blocks are hashed under; None without a compatible worker."""
        return next((w.record.compatibility for w in self._compatible()), None)

    def adapters(self) -> Mapping[str, Adapter]:
        """Returns the LoRA adapters that compatible workers serve, by name. Of two with one name
        the one that was added last counts."""
        return self._adapters

    def max_model_len(self) -> int | None:
        """The shortest context among compatible workers; None while there are none."""
        return min((w.record.max_model_len for w in self._compatible()), default=None)

    def pool_tokens(self) -> int | None:
        """Tokens of the longest sequence that fits every decode worker's KV pools; None while no
        bound is known."""
        sizes = (
            longest_sequence(w.load) * w.record.compatibility.block_size
            for w in self._compatible()
            if w.record.role == "decode"
        )
        return min(filter(None, sizes), default=None)

    def _compatible(self) -> Iterator[KnownWorker]:
        return (w for w in self._workers.values() if self.is_compatible(w.record))

    def is_compatible(self, record: WorkerRecord) -> bool:
        return record.compatibility.model_fingerprint == self.model_fingerprint

    async def wait_change(self) -> None:
        """Returns when a worker came, went, or changed its state or connection."""
        await self._changed.wait()

    def tell_change(self) -> None:
        self._stale.update(self._workers)
        self._changed.set()
        self._changed = asyncio.Event()
        self._tell_news()

    def _note_load(self, worker_id: str) -> None:
        if worker_id in self._workers:
            self._stale.add(worker_id)
            self._tell_news()

    async def _poll(self, registry: Registry) -> None:
        read_at = time.monotonic()
        records = await registry.read()
        data_set = await registry.data_set()
        self.pools_json, beat, head = await read_control(self.redis, self.cluster.cluster_id)
        told = await registry.read_loading()
        now = time.monotonic()
        news = self.control.note(
            has_pools=self.pools_json is not None, beat=beat, head=head, now=now
        )
        if news:
            log.warning("%s", news)
            self.events.add("controller", "", news, once=news)
        if dead := self._loading.note(told, now):
            await registry.end_loading(*dead)
        if self.redis_state != "ok" or data_set != self._data_set:
            if self.redis_state == "lost":
                log.info("Redis answers again")
                self.events.add(
                    "redis", "", "Redis answers again", once=str(int(time.time()) // 60)
                )
            elif self.redis_state == "ok":
                log.warning("Redis was started anew or emptied: workers publish again")
                text = "Redis was started anew or emptied: workers publish again"
                self.events.add("redis", "", text, once=data_set.decode(errors="replace"))
            self.redis_state = "ok"
            self._data_set = data_set
            self._trusted_from = now + self.cluster.record_ttl_s
        elif now - self._read_at > self.cluster.record_ttl_s - self.cluster.record_interval_s:
            # A laptop that slept, a host that was paused: the workers may have stood still, too.
            log.info("no records were read for %.1f s: workers get time", now - self._read_at)
            self._trusted_from = now + self.cluster.record_ttl_s
        self._merge({r.worker_id: r for r in records}, complete=now >= self._trusted_from)
        self._silences.note(records, now)
        self._read_at = read_at

    def _merge(self, records: dict[str, WorkerRecord], *, complete: bool) -> None:
        changed = False
        for worker_id, record in records.items():
            changed |= self._merge_one(worker_id, record)
        for worker_id in [w for w in self._workers if w not in records]:
            worker = self._workers[worker_id]
            if complete or not worker.is_up:
                log.warning("worker %s is gone: it left, or its record expired", worker_id)
                self._note_gone(worker.record)
                self._drop(worker_id)
                if worker.client is not None:
                    worker.client.give_up_if_silent(self.cluster.record_ttl_s)
                changed = True
        for client in [c for c in self._leaving if not c.num_inflight]:
            self._leaving.remove(client)
            # Closing is bounded; the view must not wait for it.
            asyncio.create_task(client.close())  # noqa: RUF006
        if changed | self._gather_adapters():
            self.tell_change()
        elif self._stale:
            self._tell_news()

    def _note_gone(self, record: WorkerRecord, *, is_replaced: bool = False) -> None:
        """Notes a record that has gone: taken away by its worker, or expired after a silence, or
        written over by the next process of its name."""
        now = time.time()
        silent_s = self._silences.silent_s(record.worker_id)
        is_removed = bool(record.num_writes) and not silent_s and not is_replaced
        has_left = record.state == "draining" or is_removed
        self.gone[record.worker_id] = Gone(record, now, has_left, silent_s)
        self.events.left(record, in_order=has_left, is_replaced=is_replaced)
        kept = [(i, g) for i, g in self.gone.items() if now - g.at < _GONE_KEPT_S]
        self.gone = dict(kept[-_GONE_MAX:])

    def _gather_adapters(self) -> bool:
        """Returns whether other adapters are served than before."""
        named = [each for w in self._compatible() for each in w.record.adapters.named]
        named.sort(key=lambda adapter: (adapter.added_at, adapter.digest))
        before = self._adapters
        self._adapters = {each.name: each for each in named}
        return before != self._adapters

    def _merge_one(self, worker_id: str, record: WorkerRecord) -> bool:
        """Takes a record in. True when something changed that a waiting request may care about."""
        known = self._workers.get(worker_id)
        if known is not None and _process(known.record) != _process(record):
            log.info("worker %s is another process now, at %s", worker_id, record.address)
            self._note_gone(known.record, is_replaced=True)
            self._drop(worker_id)
            known = None
        if known is None:
            known = self._workers[worker_id] = KnownWorker(record)
            self.gone.pop(worker_id, None)
            self.events.joined(record)
            self._shares.join(worker_id, self._roster.mean_placed(record.role))
            self._report_incompatible(record)
            changed = True
        else:
            changed = (known.record.state, known.record.role) != (record.state, record.role)
            if known.record.role != record.role:
                log.info("worker %s is in the %s pool now", worker_id, record.role)
                self._shares.join(worker_id, self._roster.mean_placed(record.role))
            self.events.changed(known.record, record)
            if record.num_writes != known.record.num_writes and record.written_at:
                known.clocks.append(record.written_at - time.time())
            forgotten = self._forgotten_before(time.monotonic())
            if known.take_record(record, last_read_at=self._read_at, forgotten_before=forgotten):
                self._stale.add(worker_id)
        if record.role != "decode" and known.client is not None:
            self._leaving.append(known.client)  # what runs on it goes on
            known.client = None
        if record.role == "decode" and known.client is None:
            known.client = WorkerClient(
                worker_id,
                record.address,
                self.calls,
                on_change=self.tell_change,
                on_load=partial(self._note_load, worker_id),
            )
        return changed

    def _forgotten_before(self, now: float) -> float:
        """Returns a time: what was sent before it shows in a record by now, or never will."""
        return now - 2 * self.cluster.record_interval_s

    def _drop(self, worker_id: str) -> None:
        worker = self._workers.pop(worker_id)
        self._roster.remove(worker_id)
        self._shares.leave(worker_id)
        self._stale.discard(worker_id)
        if worker.client is not None:
            self._leaving.append(worker.client)

    def _lose_redis(self, error: BaseException) -> None:
        if self.redis_state != "lost":
            log.warning("Redis is lost, the last known workers stand: %r", error)
            text = "Redis was lost: the last known workers stood"
            self.events.add("redis", "", text, once=f"lost:{int(time.time()) // 60}")
        self.redis_state = "lost"
        self._tell_news()

    def _report_incompatible(self, record: WorkerRecord) -> None:
        if self.model_fingerprint and not self.is_compatible(record):
            log.error(
                "worker %s serves another model than this router: its fingerprint is %s (%s), "
                "ours %s; it gets no requests",
                record.worker_id,
                record.compatibility.model_fingerprint,
                record.model,
                self.model_fingerprint,
            )


def _process(record: WorkerRecord) -> tuple[str, str, int, float]:
    return record.address, record.host, record.pid, record.started_at

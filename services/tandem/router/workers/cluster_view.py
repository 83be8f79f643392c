"""The workers as this router sees them: records in Redis, streams and reported loads.

What the router observes           What it does
a worker's record says `ready`     may place requests on the worker, if it has the router's model
                                   and, for a decode worker, if its stream is up
a record expires                   removes the worker; the stream closes when all requests on it end
Redis does not answer              keeps all known workers
Redis answers again                keeps decode workers without a record while their stream is up,
                                   for the time to live of a record
Redis was emptied                  the same
this process was paused            the same

A record's epoch changes whenever a worker publishes its blocks again. The router connects again
only if the process changed (address, process id, start time). This module places no requests.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import msgspec

from tandem.common.adapter import Adapter
from tandem.common.config.cluster import ClusterConfig, group_of, is_pool, role_of
from tandem.common.perf_model.predict import Prefill
from tandem.common.process.ticks import sleep_until_tick
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
from tandem.router.workers.pools import control_keys, pools_of_group
from tandem.router.workers.problem_watch import ProblemWatch
from tandem.router.workers.rows import Gone, Seen, worker_rows
from tandem.router.workers.troubles import clock_of_router

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5  # interval between reads of the workers' records
_IDLE_INTERVAL_S = 1.0  # the interval while no worker has work, so that an idle cluster costs less
# The interval while there is no decode worker. Requests wait for the first one, so it has to be
# found quickly.
_AWAITED_INTERVAL_S = 0.1
_AFTER_RECORDS_S = 0.05
_NOTE_INTERVAL_S = 0.9
_AFTER_BUG_S = 30.0
_GONE_KEPT_S = 900.0
_GONE_MAX = 64


@dataclass(slots=True)
class ClusterView:
    """The workers of one model that a router knows.

    `run` updates the view and calls listeners after changes.
    """

    cluster: ClusterConfig
    redis: Client
    tls_dir: str = ""
    # The group of pools whose workers this view has; "": the group of the first model.
    group: str = ""
    # Identifies the model that this router has loaded. Only workers with the same fingerprint are
    # compatible. "": the model is not loaded yet, so no worker is compatible.
    model_fingerprint: str = ""
    redis_state: Literal["unknown", "ok", "lost"] = "unknown"
    pools_json: bytes | None = None  # JSON of the pools in Redis; None: no pool controller
    pool_watch: PoolWatch = field(default_factory=PoolWatch)
    num_routers: Callable[[], int] = lambda: 1  # number of routers of the cluster
    decisions: list[ScalingDecision] = field(
        default_factory=list
    )  # latest decisions of the autoscaler
    calls: PeerCalls = field(init=False)
    _listeners: list[Callable[[], None]] = field(default_factory=list)
    _workers: dict[str, KnownWorker] = field(default_factory=dict)
    _roster: Roster = field(default_factory=Roster)
    _shares: Shares = field(default_factory=Shares)  # recent prefill work of each worker
    _made_at: float = field(default_factory=time.monotonic)
    # Ids of the workers whose snapshot in `_roster` is outdated.
    _stale: set[str] = field(default_factory=set)
    _problems_noted_at: float = 0.0  # monotonic time of the last check for problems
    _read_at: float = 0.0  # monotonic time at which the workers' records were last read from Redis
    _leaving: list[WorkerClient] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _adapters: dict[str, Adapter] = field(default_factory=dict)
    # Workers that have left or were lost recently, by id. A worker that returns is removed here.
    gone: dict[str, Gone] = field(default_factory=dict)
    _loading: LoadingWorkers = field(default_factory=LoadingWorkers)
    events: EventLog = field(init=False)
    control: ControlWatch = field(default_factory=ControlWatch)
    problems: ProblemWatch = field(init=False)
    _silences: Silences = field(init=False)
    _data_set: bytes = b""
    # Monotonic time. Until then a missing record proves nothing, because workers may not have
    # written their records yet: Redis was away or emptied, or this process was paused.
    _trusted_from: float = 0.0

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
                    log.exception(
                        "the list of the workers' problems could not be updated, because of an "
                        "error in the router; requests are still served"
                    )
                    self._problems_noted_at += _AFTER_BUG_S
                # Workers write their records at ticks, so the router reads new ones.
                await sleep_until_tick(self._poll_interval_s(), after_s=_AFTER_RECORDS_S)
        finally:
            clients = [w.client for w in self._workers.values() if w.client] + self._leaving
            await asyncio.gather(*(c.close() for c in clients))

    def _poll_interval_s(self) -> float:
        if self.redis_state != "ok":
            return POLL_INTERVAL_S
        if not self.has_decode_worker():
            return _AWAITED_INTERVAL_S
        if self.loading or any(w.has_work for w in self._workers.values()):
            return POLL_INTERVAL_S
        # Sleeps until a tick take up to one and a half intervals.
        return _IDLE_INTERVAL_S if self._paused_after_s >= 2 * _IDLE_INTERVAL_S else POLL_INTERVAL_S

    @property
    def _paused_after_s(self) -> float:
        """If the last read of records is longer ago than this, this process was paused."""
        return self.cluster.record_ttl_s - self.cluster.record_interval_s

    def roster(self) -> Roster:
        """Returns the current snapshots of all workers with KV. Only outdated snapshots are
        replaced."""
        now_s = time.monotonic() - self._made_at
        if self._shares.rebase(now_s):
            self._roster = Roster()
            self._stale.update(self._workers)
        for worker_id in self._stale:
            worker = self._workers[worker_id]
            if not worker.record.has_kv:
                continue
            compatible = self.is_compatible(worker.record)
            share = self._shares.share(worker_id)
            self._roster.put(worker.snapshot(compatible=compatible, prefill_share=share))
        self._stale.clear()
        self._roster.second_weight = self._shares.second_weight(now_s)
        # The shares count the prompts of this router only, which gets its part of the requests.
        self._roster.full_share = self._shares.full_share(now_s) / self.num_routers()
        return self._roster

    def listen(self, listener: Callable[[], None]) -> None:
        """Registers `listener`, which is called whenever a worker's load or state changes."""
        self._listeners.append(listener)

    def _notify_listeners(self) -> None:
        for listener in self._listeners:
            listener()

    def snapshots(self) -> list[WorkerSnapshot]:
        return list(self.roster().by_id.values())

    def has_decode_worker(self, refused: frozenset[str] = frozenset()) -> bool:
        """Returns whether there is a usable decode worker whose epoch is not in `refused`."""
        return any(
            w.usable and w.role == "decode" and w.epoch not in refused for w in self.snapshots()
        )

    def known(self) -> list[KnownWorker]:
        return list(self._workers.values())

    def seen(self) -> list[Seen]:
        """Returns all workers with a record, as operators see them.

        Workers are not shown as incompatible while the router's own model is still loading. A
        worker is not shown as unconnected while the router connects for the first time.
        """
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
        """Notices of the workers that load their model and have no record yet, by worker id."""
        return self._loading.now(time.monotonic(), self.cluster.record_ttl_s)

    def cluster_problems(self) -> dict[str, str]:
        """Returns a phrase for each problem that is not about a worker or Redis.

        The keys name what is faulty, such as "controller" or "clock".
        """
        found = self.control.problems | self.pool_watch.problems
        ahead_s = clock_of_router([w.clock_ahead_s for w in self._workers.values()])
        if ahead_s:
            way = "behind" if ahead_s > 0 else "ahead of"
            found["clock"] = (
                f"this router's clock is {abs(ahead_s):.0f} s {way} the workers' clocks"
            )
        return found

    def _note_problems(self) -> None:
        if (now := time.monotonic()) - self._problems_noted_at < _NOTE_INTERVAL_S:
            return
        self._problems_noted_at = now
        pools = self.pool_watch.states([w.record for w in self._workers.values()], self.pools_json)
        rows = worker_rows(self.seen(), self.gone, pools, time.time(), self.loading)
        self.pool_watch.note(pools, rows, now)
        self.problems.note(rows, pools, self.cluster_problems())

    def client(self, worker_id: str) -> WorkerClient | None:
        worker = self._workers.get(worker_id)
        return worker.client if worker else None

    def note_prefill(self, worker_id: str, prefill: Prefill) -> float:
        """Adds the work of a sent prompt to a prefill worker's load.

        The work is removed when the load in the worker's record includes the work. Returns the
        current monotonic time in seconds, which `note_prefilled` needs.
        """
        now = time.monotonic()
        if worker := self._workers.get(worker_id):
            worker.note_prefill(prefill, now, forgotten_before=self._forgotten_before(now))
            self._stale.add(worker_id)
        return now

    def note_prefilled(
        self, worker_id: str, prefill: Prefill, sent_at: float, *, by_it: bool
    ) -> None:
        """Records that a prompt sent to a prefill worker at `sent_at` no longer waits there.

        `by_it` is True if this worker computed the prompt, and False if another worker did.
        """
        if worker := self._workers.get(worker_id):
            worker.note_prefilled(prefill, sent_at, by_it=by_it)
            self._stale.add(worker_id)
            self._notify_listeners()

    def note_share(self, worker_id: str, prefill_s: float) -> None:
        """Adds a prompt to the worker's recent prefill work (`shares.py`).

        `prefill_s` is the predicted duration of the prompt's prefill in seconds.
        """
        if worker_id in self._workers:
            self._shares.sent(worker_id, prefill_s, time.monotonic() - self._made_at)
            self._stale.add(worker_id)

    def compatibility(self) -> KvCompatibility | None:
        """Returns the workers' KV compatibility, on which block hashes depend.

        If the workers differ, the first compatible worker decides. Returns None without a
        compatible worker.
        """
        return next((w.record.compatibility for w in self._compatible()), None)

    def adapters(self) -> Mapping[str, Adapter]:
        """Returns the LoRA adapters of compatible workers by name.

        Of several adapters with the same name, the last added adapter is returned.
        """
        return self._adapters

    def max_model_len(self) -> int | None:
        """Returns the smallest `max_model_len` of compatible workers; None if there are none."""
        return min((w.record.max_model_len for w in self._compatible()), default=None)

    def pool_tokens(self) -> int | None:
        """Returns the length, in tokens, of the longest sequence that every decode worker can hold.

        Returns None while no worker has reported its limit.
        """
        sizes = (
            w.load.longest_sequence * w.record.compatibility.block_size
            for w in self._compatible()
            if w.record.role == "decode"
        )
        return min(filter(None, sizes), default=None)

    def _compatible(self) -> Iterator[KnownWorker]:
        """Yields the workers with KV that have the router's model."""
        known = self._workers.values()
        return (w for w in known if w.record.has_kv and self.is_compatible(w.record))

    def is_compatible(self, record: WorkerRecord) -> bool:
        return record.compatibility.model_fingerprint == self.model_fingerprint

    async def wait_change(self) -> None:
        """Waits until a worker joins, leaves, or changes its state or connection."""
        await self._changed.wait()

    def notify_change(self) -> None:
        self._stale.update(self._workers)
        self._changed.set()
        self._changed = asyncio.Event()
        self._notify_listeners()

    def _note_load(self, worker_id: str) -> None:
        if worker_id in self._workers:
            self._stale.add(worker_id)
            self._notify_listeners()

    async def _poll(self, registry: Registry) -> None:
        read_at = time.monotonic()
        found = await registry.read_all(control_keys(self.cluster.cluster_id))
        pools_json, beat, head = found.more
        data_set = found.data_set
        records = [each for each in found.records if each.group == self.group]
        self.pools_json = pools_of_group(pools_json, self.group)
        notices = {
            worker_id: msgspec.structs.replace(notice, pool=role_of(notice.pool))
            for worker_id, notice in found.loading.items()
            if group_of(notice.pool) == self.group and is_pool(notice.pool)
        }
        now = time.monotonic()
        restart = self.control.note(
            has_pools=self.pools_json is not None, beat=beat, head=head, now=now
        )
        if restart:
            log.warning("%s", restart)
            self.events.add("controller", "", restart, once=restart)
        if dead := self._loading.note(notices, now):
            await registry.end_loading(*dead)
        if self.redis_state != "ok" or data_set != self._data_set:
            if self.redis_state == "lost":
                log.info("Redis answers again")
                self.events.add(
                    "redis", "", "Redis answers again", once=str(int(time.time()) // 60)
                )
            elif self.redis_state == "ok":
                text = "Redis was restarted or emptied: workers write their data to it again"
                log.warning("%s", text)
                self.events.add("redis", "", text, once=data_set.decode(errors="replace"))
            self.redis_state = "ok"
            self._data_set = data_set
            self._trusted_from = now + self.cluster.record_ttl_s
        elif now - self._read_at > self._paused_after_s:
            # The host was suspended or this process was paused. The workers may have been paused,
            # too. So they get time to write their records again, and are not removed meanwhile.
            pause_s = now - self._read_at
            log.info(
                "this router was paused and read no worker records for %.1f s. For the next "
                "%g s, the router also keeps connected decode workers that have no record",
                pause_s,
                self.cluster.record_ttl_s,
            )
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
                log.warning(
                    "worker %s has no record in Redis any more, so it gets no more requests: it "
                    "shut down, or it stopped reporting",
                    worker_id,
                )
                self._note_gone(worker.record)
                self._drop(worker_id)
                if worker.client is not None:
                    worker.client.give_up_if_silent(self.cluster.record_ttl_s)
                changed = True
        for client in [c for c in self._leaving if not c.num_inflight]:
            self._leaving.remove(client)
            # Polling continues while the client closes.
            asyncio.create_task(client.close())  # noqa: RUF006
        if changed | self._gather_adapters():
            self.notify_change()
        elif self._stale:
            self._notify_listeners()

    def _note_gone(self, record: WorkerRecord, *, is_replaced: bool = False) -> None:
        """Keeps the last record of a worker that has gone, and adds an event.

        There are three cases: the worker has removed its record; the record has expired, because
        the worker was silent; or another process has the worker's id now (`is_replaced`).
        """
        now = time.time()
        silent_s = self._silences.silent_s(record.worker_id)
        is_removed = bool(record.num_writes) and not silent_s and not is_replaced
        has_left = record.state == "draining" or is_removed
        self.gone[record.worker_id] = Gone(record, now, has_left, silent_s)
        self.events.left(record, in_order=has_left, is_replaced=is_replaced)
        kept = [(i, g) for i, g in self.gone.items() if now - g.at < _GONE_KEPT_S]
        self.gone = dict(kept[-_GONE_MAX:])

    def _gather_adapters(self) -> bool:
        """Updates the LoRA adapters from the workers' records; returns whether any changed."""
        named = [each for w in self._compatible() for each in w.record.adapters.named]
        named.sort(key=lambda adapter: (adapter.added_at, adapter.digest))
        before = self._adapters
        self._adapters = {each.name: each for each in named}
        return before != self._adapters

    def _merge_one(self, worker_id: str, record: WorkerRecord) -> bool:
        """Updates one worker from its record.

        Returns True if the worker is new, or if its state or role has changed. Waiting requests
        must then be placed again.
        """
        known = self._workers.get(worker_id)
        if known is not None and _process(known.record) != _process(record):
            log.info("worker %s is a new process now, at the address %s", worker_id, record.address)
            self._note_gone(known.record, is_replaced=True)
            self._drop(worker_id)
            known = None
        if known is None:
            known = self._workers[worker_id] = KnownWorker(record)
            self.gone.pop(worker_id, None)
            self.events.joined(record)
            self._shares.join(worker_id, self._roster.mean_prefill_share(record.role))
            self._report_incompatible(record)
            changed = True
        else:
            changed = (known.record.state, known.record.role) != (record.state, record.role)
            if known.record.role != record.role:
                log.info("worker %s is in the %s pool now", worker_id, record.role)
                self._shares.join(worker_id, self._roster.mean_prefill_share(record.role))
            self.events.changed(known.record, record)
            if record.num_writes != known.record.num_writes and record.written_at:
                known.clocks.append(record.written_at - time.time())
            forgotten = self._forgotten_before(time.monotonic())
            if known.take_record(record, last_read_at=self._read_at, forgotten_before=forgotten):
                self._stale.add(worker_id)
        decodes = record.role == "decode" or may_decode(record)
        if not decodes and known.client is not None:
            self._leaving.append(known.client)  # requests on the stream continue
            known.client = None
        if decodes and known.client is None:
            known.client = WorkerClient(
                worker_id,
                record.address,
                self.calls,
                on_change=self.notify_change,
                on_load=partial(self._note_load, worker_id),
            )
        return changed

    def _forgotten_before(self, now: float) -> float:
        """Returns a time two intervals of the workers' records before `now`.

        Work that was sent earlier than this is no longer added to a worker's load: either the load
        in the worker's record includes the work by now, or the work never reached the worker.
        """
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
            log.warning(
                "Redis does not answer (%r); until it does, this router uses the workers that it "
                "knows",
                error,
            )
            text = "Redis did not answer; the last known workers were used"
            self.events.add("redis", "", text, once=f"lost:{int(time.time()) // 60}")
        self.redis_state = "lost"
        self._notify_listeners()

    def _report_incompatible(self, record: WorkerRecord) -> None:
        if self.model_fingerprint and not self.is_compatible(record):
            log.error(
                "worker %s gets no requests from this router, because the models differ: the "
                "worker has the model %s with fingerprint %s, and the router's model has "
                "fingerprint %s. Start the worker and the router with the same model",
                record.worker_id,
                record.model,
                record.compatibility.model_fingerprint,
                self.model_fingerprint,
            )


def may_decode(record: WorkerRecord) -> bool:
    """Returns whether a prefill worker also decodes requests whose prompts it prefills."""
    return record.role == "prefill" and record.prefill_at == "auto"


def _process(record: WorkerRecord) -> tuple[str, str, int, float]:
    return record.address, record.host, record.pid, record.started_at

"""Writes and reads the cluster's events, such as a worker that joins, or requests that failed.

    {tandem:CLUSTER}:events:all    STREAM of limited length; field `entry` is a ClusterEvent as JSON
Redis keeps the events when routers restart.
All routers see the same worker join or leave, but only one of them writes the event. Requests with
the same outcome are counted and written as one event per second. Changes requested by operators are
in the audit trail, and `read` returns them, too.
"""

import asyncio
import time
from collections import Counter, deque

import msgspec

from tandem.common.process.cancellation import cancel
from tandem.net.security.audit_trail import AuditEntry, AuditTrail
from tandem.net.store.client import Client
from tandem.net.store.cluster_event import ClusterEvent
from tandem.net.store.journal import Journal
from tandem.net.store.registry import WorkerRecord

_STREAM = "all"
_TELL_EVERY_S = 1.0
_MOVED_S = 60.0
_MOVES_MAX = 10_000
_COUNTED_MAX = 100  # largest number of different outcomes that are counted in one second


class EventLog:
    """Writes and reads events for one router. `run` writes the events that `add` has queued."""

    def __init__(self, redis: Client, cluster_id: str) -> None:
        prefix = f"{{tandem:{cluster_id}}}:events"
        self._journal = Journal(redis, prefix, (_STREAM,), "the log of events")
        self._counted: Counter[tuple[str, str, str]] = Counter()
        self._has_counted = asyncio.Event()
        # the latest moves of requests: (monotonic seconds, the worker that lost the request)
        self._moves: deque[tuple[float, str]] = deque(maxlen=_MOVES_MAX)

    def add(self, kind: str, about: str, text: str, once: str = "") -> None:
        """Queues an event.

        `once` is a key, or empty. If any router has written an event of the same kind and key, the
        event is not written again.
        """
        event = ClusterEvent(time.time(), kind, about, text)
        self._journal.add(_STREAM, event, f"{kind}:{once}" if once else "")

    def count(self, kind: str, about: str, text: str) -> None:
        """Counts a request; `text` describes what happened to it."""
        if kind == "migrated":
            self._moves.append((time.monotonic(), about))
        if (kind, about, text) in self._counted or len(self._counted) < _COUNTED_MAX:
            self._counted[kind, about, text] += 1
            self._has_counted.set()

    @property
    def num_moved(self) -> int:
        """The number of requests that this router moved to other workers in the last minute."""
        return self.moved_off().total()

    def moved_off(self) -> Counter[str]:
        """Counts the requests that this router moved in the last minute, by the worker that had
        them before."""
        since = time.monotonic() - _MOVED_S
        return Counter(worker_id for at, worker_id in self._moves if at > since)

    async def run(self) -> None:
        """Writes events until it is cancelled. Then writes the queued events, if Redis answers."""
        writing = asyncio.create_task(self._journal.run())
        try:
            while True:
                await self._has_counted.wait()
                await asyncio.sleep(_TELL_EVERY_S)
                self._add_counted()
        finally:
            self._add_counted()
            await cancel(writing)

    async def read(self, num_max: int, trail: AuditTrail) -> list[ClusterEvent]:
        """Returns the latest events and changes of all routers, newest first. Raises NotNow."""
        events = await self._journal.read(_STREAM, num_max, _decode)
        events += [_of_change(entry) for entry in await trail.read_kind("changes", num_max)]
        return sorted(events, key=lambda event: event.at, reverse=True)[:num_max]

    def _add_counted(self) -> None:
        counted = self._counted
        self._counted = Counter()
        self._has_counted.clear()
        for (kind, about, text), number in counted.items():
            self.add(kind, about, f"{number} request{'' if number == 1 else 's'} {text}")

    def joined(self, record: WorkerRecord) -> None:
        """Adds an event for a worker process whose record is new."""
        text = f"{record.role} worker at {record.address}, process {record.pid} on {record.host}"
        self.add("started", record.worker_id, text, once=record.epoch)

    def changed(self, before: WorkerRecord, now: WorkerRecord) -> None:
        """Adds events for the differences between two records of a process."""
        name = now.worker_id
        epoch = now.epoch
        if before.state != "draining" and now.state == "draining":
            self.add("draining", name, "it takes no new requests", once=epoch)
        if before.role != now.role:
            text = f"it moved from the {before.role} pool to the {now.role} pool"
            self.add("role", name, text, once=f"{epoch}:{now.num_writes}")
        for peer, pair in now.pairs.items():
            was = before.pairs.get(peer)
            why = f": {pair.reason}" if pair.reason else ""
            text = f"it reads blocks of {peer} over {pair.transport}"
            if was is not None and was.transport != pair.transport:
                text += f" now, and did so over {was.transport} before{why}"
                self.add("transport", name, text, once=f"{epoch}:{peer}:{now.num_writes}")
            # One event per process and transport is enough, because the reason is the same for
            # every other worker with which this process exchanges KV.
            elif was is None and why:
                self.add("transport", name, text + why, once=f"{epoch}:{pair.transport}")

    def left(self, record: WorkerRecord, *, in_order: bool, is_replaced: bool = False) -> None:
        """Adds an event for a worker whose record has gone.

        `in_order` is True if the worker drained or removed its record. `is_replaced` is True if
        another process has the worker's id now.
        """
        how = f"it stopped reporting; it was at {record.address}"
        if is_replaced:
            how = f"its process {record.pid} ended without notice, and a new process replaced it"
        text = "it shut down after it finished its requests" if in_order else how
        self.add("left" if in_order else "lost", record.worker_id, text, once=record.epoch)


def _of_change(entry: AuditEntry) -> ClusterEvent:
    text = f"{entry.what}: {entry.before} -> {entry.after}, by {entry.caller}"
    kind = "refused" if entry.why else "changed"
    return ClusterEvent(entry.at, kind, "", f"{text}: {entry.why}" if entry.why else text)


def _decode(text: bytes) -> ClusterEvent:
    return msgspec.json.decode(text, type=ClusterEvent)

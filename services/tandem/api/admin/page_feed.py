"""The live feed of the operators' page: `GET /v1/cluster/live`, as server-sent events.

While at least one page is open, the feed takes a snapshot of the cluster every second. The changes
since the previous snapshot are encoded once and sent to all open pages (viewers). Every STEP_S
seconds, also while no page is open, the feed adds a sample to the history that the page's charts
show.

  event     content
  full      the complete snapshot, for a new viewer and for a viewer that fell behind
  delta     the changes since the previous event; the field `now` is in every event, as a heartbeat

  limit         what it limits                   when the limit is reached
  VIEWERS_MAX   viewers of one router            a further viewer is refused
  PENDING_MAX   events queued for one viewer     a `full` event replaces the queued events
  STREAM_S      seconds of one viewer's stream   the stream ends, and the page opens a new stream

A new stream is a new call, which checks the API key again. So a revoked key stops working on an
open page after STREAM_S seconds at the latest.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.api import sse
from tandem.api.admin.snapshot import (
    EVENTS_MAX,
    WORKER_COLUMNS,
    Snapshot,
    delta,
    serving_of,
    take_snapshot,
)
from tandem.api.http.stream import until_disconnect
from tandem.common.config.router import RouterConfig
from tandem.common.process.cancellation import cancel
from tandem.common.process.ticks import sleep_until_tick
from tandem.errors import QueueFull, TandemError
from tandem.net.security.access import Access
from tandem.net.security.audit_trail import AuditTrail
from tandem.net.store.client import UNREACHABLE
from tandem.net.store.cluster_event import ClusterEvent
from tandem.net.store.traffic import Traffic, write_traffic
from tandem.router.metrics.history import COLUMNS, STEP_S, History, sums_of
from tandem.router.metrics.router import Metrics
from tandem.router.request.generator import Generator
from tandem.router.scaling.control import ClusterControl
from tandem.router.workers.rows import worker_rows

log = logging.getLogger(__name__)

LIVE_PATH = "/v1/cluster/live"
INTERVAL_S = 1.0
VIEWERS_MAX = 32
PENDING_MAX = 8
STREAM_S = 600.0
_EVENTS_EVERY_S = 2.0
_EVENTS_DEADLINE_S = 1.0
_RETRY_AFTER_S = 10.0
_AFTER_BUG_S = 30.0


class Viewer:
    """One open page, and the events queued for that page."""

    def __init__(self, feed: "PageFeed") -> None:
        self._feed = feed
        self._pending: deque[bytes] = deque()
        self._needs_full = True
        self._news = asyncio.Event()

    def offer(self, event: bytes) -> None:
        """Queues an event. If the queue is full, a `full` event replaces all queued events."""
        if len(self._pending) >= PENDING_MAX:
            self._pending.clear()
            self._needs_full = True
        if not self._needs_full:
            self._pending.append(event)
        self._news.set()

    def end(self) -> None:
        self._news.set()

    async def next(self) -> bytes:
        """Waits for the next event. Returns b"" once the feed is closed."""
        while not self._feed.is_closed:
            if self._needs_full and (full := self._feed.full()):
                self._needs_full = False
                self._pending.clear()
                return full
            if self._pending:
                return self._pending.popleft()
            self._news.clear()
            await self._news.wait()
        return b""


class PageFeed:
    """The live feed of one router. `run` takes the snapshots and queues their changes for the
    viewers."""

    def __init__(
        self,
        config: RouterConfig,
        generator: Generator,
        control: ClusterControl,
        metrics: Metrics,
        trail: AuditTrail,
        public: Access,
    ) -> None:
        """`public` has the access rules of the public listener."""
        self.config = config
        self.is_closed = False
        # the feeds of all models of the router, that of the first model first
        self.siblings: list[PageFeed] = [self]
        self._generator = generator
        self._control = control
        self._view = control.view
        self._metrics = metrics
        self._trail = trail
        self._public = public
        self._history = History(metrics)
        self._viewers: set[Viewer] = set()
        self._has_viewers = asyncio.Event()
        self._started_at = time.time()
        self._snapshot = Snapshot()
        self._pools: Mapping[str, Mapping[str, Any]] = {}  # state of the pools at the last look
        self._num_sampled = 0  # number of history samples that were sent to viewers
        self._full = b""  # the last snapshot as a `full` event; empty until a viewer needs one
        # time of the last snapshot, in seconds since the epoch; 0 while no page is open
        self._seen_at = 0.0
        self._events: list[ClusterEvent] = []

    def check_room(self) -> None:
        """Raises QueueFull if VIEWERS_MAX pages are open."""
        if len(self._viewers) >= VIEWERS_MAX:
            raise QueueFull(
                f"the router's live page is already open {VIEWERS_MAX} times, the maximum; close "
                "one of the open pages",
                retry_after_s=_RETRY_AFTER_S,
            )

    @contextlib.contextmanager
    def viewing(self) -> Iterator[Viewer]:
        """Registers a viewer until the `with` block ends."""
        viewer = Viewer(self)
        self._viewers.add(viewer)
        self._has_viewers.set()
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)

    def close(self) -> None:
        """Ends the streams of all viewers."""
        self.is_closed = True
        for viewer in self._viewers:
            viewer.end()

    async def run(self) -> None:
        """Adds samples to the history and takes snapshots, until the task is cancelled."""
        sampling = asyncio.create_task(self._sample_loop())
        reading = asyncio.create_task(self._read_events_loop())
        try:
            while True:
                await self._has_viewers.wait()
                try:
                    await self.look(time.time())
                except Exception:
                    log.exception(
                        "the router's live page cannot be updated; the router still serves requests"
                    )
                    await asyncio.sleep(_AFTER_BUG_S)
                await asyncio.sleep(INTERVAL_S)
                if not self._viewers:
                    self._has_viewers.clear()
                    self._seen_at = 0.0
        finally:
            self.close()
            await cancel(sampling, reading)

    async def look(self, now: float) -> None:
        """Takes a snapshot at `now` (seconds since the epoch), and queues the changes since the
        previous snapshot for all viewers."""
        self._pools = pools = await self._control.sizes.pools()
        before = self._snapshot
        self._snapshot = take_snapshot(
            self.config,
            self._generator,
            self._view,
            pools,
            self._events,
            self._metrics,
            self._history.queued_s(),
            [each.model for each in self.siblings],
            needs_key=self._public.needs_key,
            started_at=self._started_at,
            now=now,
        )
        is_first = not self._seen_at
        self._seen_at = now
        self._full = b""
        flows = self._metrics.flows.take()
        samples = self._history.since(self._num_sampled)
        self._num_sampled = self._history.num_taken
        if is_first:
            for viewer in self._viewers:
                viewer.end()
            return
        changed = {"now": now, **delta(before, self._snapshot)}
        if samples:
            changed["samples"] = samples
        if flows:
            changed["flows"] = flows
        event = sse.event(changed, "delta")
        for viewer in self._viewers:
            viewer.offer(event)

    def full(self) -> bytes:
        """Encodes the last snapshot as a `full` event. Returns b"" if no snapshot was taken since a
        page was opened."""
        if not self._seen_at:
            return b""
        if not self._full:
            snapshot = self._snapshot
            seen = self._history.since(0)
            unseen = self._history.num_taken - self._num_sampled
            everything: dict[str, Any] = {
                "now": self._seen_at,
                "worker_columns": WORKER_COLUMNS,
                "sample_columns": COLUMNS,
                "step_s": STEP_S,
                "head": snapshot.head,
                "workers": snapshot.workers,
                "requests": list(snapshot.requests.values()),
                "events": snapshot.events,
                "answers": snapshot.answers,
                "figures": snapshot.figures,
                "step": snapshot.step,
                # Samples taken after the last snapshot are left out: the next `delta` event
                # contains these.
                "samples": seen[: len(seen) - unseen],
            }
            self._full = sse.event(everything, "full")
        return self._full

    def sample(self, now: float) -> None:
        """Adds a sample of the cluster's load at `now` (seconds since the epoch) to the history."""
        view = self._view
        rows = worker_rows(view.seen(), view.gone, self._pools, now, view.loading)
        num_in_router = self._generator.requests.num_in_router()
        self._history.take(now, sums_of(serving_of(rows, view.known()), num_in_router))
        if not self._viewers:
            self._metrics.flows.take()  # No page shows the collected flows, so they are discarded.

    @property
    def model(self) -> str:
        """Name of the model that the feed shows."""
        return self._generator.served_name

    def traffic(self) -> Traffic:
        """Returns the counts of the model's requests."""
        return self._history.traffic(self._generator.requests.num_in_router())

    async def _sample_loop(self) -> None:
        redis, cluster = self._view.redis, self.config.cluster
        while True:
            await sleep_until_tick(STEP_S)
            self.sample(time.time())
            if self.siblings[0] is not self:
                continue  # the feed of the first model writes the counts of all models
            traffic = sum((each.traffic() for each in self.siblings[1:]), self.traffic())
            with contextlib.suppress(*UNREACHABLE):
                await write_traffic(redis, cluster.cluster_id, self.config.router_id, traffic)

    async def _read_events_loop(self) -> None:
        """Reads the latest cluster events every _EVENTS_EVERY_S while a page is open. If Redis is
        unreachable, the page keeps showing the events that were read before."""
        while True:
            await self._has_viewers.wait()
            try:
                with contextlib.suppress(TandemError, TimeoutError):
                    async with asyncio.timeout(_EVENTS_DEADLINE_S):
                        self._events = await self._view.events.read(EVENTS_MAX, self._trail)
            except Exception:  # for example, a router of another version wrote an unknown entry
                log.exception(
                    "the router's live page cannot read new events; older events stay visible"
                )
                await asyncio.sleep(_AFTER_BUG_S)
            await asyncio.sleep(_EVENTS_EVERY_S)


class LiveStream(Response):
    """The event stream of one viewer."""

    def __init__(self, feed: PageFeed) -> None:
        """Raises QueueFull if VIEWERS_MAX pages are open. The response has not started here, so the
        client gets the error as an HTTP status."""
        feed.check_room()
        super().__init__(
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
            media_type="text/event-stream",
        )
        del self.headers["content-length"]  # the length of a stream is unknown
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._feed.viewing() as viewer:
            try:
                await until_disconnect(receive, self._send_all(viewer, send))
            except (ClientDisconnect, OSError):
                log.debug("a viewer closed the router's live page")

    async def _send_all(self, viewer: Viewer, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STREAM_S):
                while event := await viewer.next():
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

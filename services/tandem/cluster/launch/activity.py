"""Prints the lines that `tandem up` shows while the cluster runs.

- One line every 10 s while there is traffic, from the counts of the routers and workers.
- One line for each event, from the log of events, and one for each new pool size.

A thread reads the counts and the events from Redis. It prints nothing while Redis does not answer.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
from rich.markup import escape

from tandem.common.printable import printable
from tandem.common.worker_load import WorkerLoad
from tandem.net.store.client import UNREACHABLE, UNREADABLE, SyncClient, connect_blocking
from tandem.net.store.cluster_event import ClusterEvent, events_key
from tandem.net.store.registry import WorkerRecord
from tandem.net.store.traffic import Traffic, read_traffic

_LINE_INTERVAL_S = 10.0
_LOOK_INTERVAL_S = 0.5  # pause after events, and after an error
_EVENT_WAIT_MS = 1000  # longest wait for an event before the pools are read again
_EVENTS_MAX = 200  # largest number of events that are read at once
_SAME_S = 30.0
# Kinds of events that need no line: another line says the same, or the event concerns no operator.
_QUIET = {"mode", "transport", "not connected"}
_GOOD = {"started", "well", "left", "draining", "role", "changed", "migrated"}


@dataclass(slots=True)
class Activity:
    """Reads Redis in a thread and prints lines with `say`, which takes rich's markup."""

    redis_url: str = field(repr=False)
    cluster_id: str
    say: Callable[[str], None]
    _last_event_id: str = "$"
    # worker id -> time of the worker's last "ended" event
    _told: dict[str, float] = field(default_factory=dict)
    _ended: set[str] = field(default_factory=set)  # ids of workers that ended and are not back
    _sizes: dict[str, int] = field(default_factory=dict)
    _before: dict[str, Traffic] = field(default_factory=dict)
    _line_at: float = 0.0
    _stopped: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True, name="activity").start()

    def stop(self) -> None:
        """Ends the output. It is called before a shutdown, which need not be reported."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            with suppress(*UNREACHABLE), closing(connect_blocking(self.redis_url)) as redis:
                while not self._stopped.is_set():
                    if self._look(redis):
                        self._stopped.wait(_LOOK_INTERVAL_S)
            self._stopped.wait(_LOOK_INTERVAL_S)

    def _look(self, redis: SyncClient) -> bool:
        """Waits for events for up to `_EVENT_WAIT_MS`, and shows what is new. Returns whether there
        were events."""
        events, pools = self._read(redis)
        if self._stopped.is_set():
            return False
        for event in events:
            if line := self.event_line(event, time.time()):
                self.say(line)
        for line in self._new_sizes(pools):
            self.say(line)
        now = time.monotonic()
        if now - self._line_at >= _LINE_INTERVAL_S:
            routers: Any = redis.hkeys(f"{{tandem:{self.cluster_id}}}:routers")
            traffic = read_traffic(redis, self.cluster_id, [name.decode() for name in routers])
            records = self._records(redis)
            line = traffic_line(self._before, traffic, now - self._line_at, records)
            self._before = traffic
            self._line_at = now
            if line:
                self.say(line)
        return bool(events)

    def _read(self, redis: SyncClient) -> tuple[list[ClusterEvent], object]:
        """Waits for new events, and reads the state of the pools, in one round trip."""
        key = events_key(self.cluster_id)
        if self._last_event_id == "$":  # events before the cluster was ready are not shown
            last: Any = redis.xrevrange(key, count=1)
            self._last_event_id = last[0][0].decode() if last else "0-0"
        with redis.pipeline(transaction=False) as pipe:
            # In a pipeline, the next commands wait until this one has returned.
            pipe.xread({key: self._last_event_id}, count=_EVENTS_MAX, block=_EVENT_WAIT_MS)
            pipe.exists(key)
            pipe.get(f"{{tandem:{self.cluster_id}}}:pools")
            found, is_there, pools = pipe.execute()
        events = []
        for event_id, fields in (each for _, entries in found for each in entries):
            self._last_event_id = event_id.decode()
            with suppress(KeyError, *UNREADABLE):
                events.append(msgspec.json.decode(fields[b"entry"], type=ClusterEvent))
        if not is_there:
            self._last_event_id = "0-0"  # Redis was restarted and numbers events anew
        return events, pools

    def event_line(self, event: ClusterEvent, now: float) -> str:
        """Returns the line of an event, with rich's markup; "" if the event needs no line."""
        name = event.about
        text = event.text
        match event.kind:
            case kind if kind in _QUIET:
                return ""
            case "ended":
                self._ended.add(name)
                self._told[name] = now
                line = f"{name}: its process {text}; a new one is started"
            case "lost":
                if now - self._told.get(name, 0.0) < _SAME_S:
                    return ""  # the worker's "ended" event was shown already
                self._ended.add(name)
                line = f"{name} is lost: {text}"
            case "started" if name in self._ended:
                self._ended.discard(name)
                line = f"{name} is back: {text}"
            case "started":
                line = f"{name} joined: {text}"
            case "well":
                line = f"{name}: {text}"
            case "refused":
                line = f"{text}: {name}"
            case "migrated":
                line = text if not name else f"{name}: {text}"
            case "draining":
                line = f"{name} drains: it takes no new requests"
            case "left":
                line = f"{name} has left: it finished its requests"
            case kind:
                line = f"{name} ({kind}): {text}" if name else text
        colour = "" if event.kind in _GOOD else "[yellow]"
        return colour + escape(printable(line))

    def _new_sizes(self, value: object) -> list[str]:
        if not isinstance(value, bytes):
            return []
        try:
            pools = msgspec.json.decode(value, type=dict[str, dict[str, Any]])
        except UNREADABLE:
            return []
        sizes = {name: state["wanted"] for name, state in pools.items() if "wanted" in state}
        before = self._sizes
        self._sizes = sizes
        return [
            f"the {name} pool is scaled from {before[name]} to {size}"
            for name, size in sizes.items()
            if before.get(name, size) != size
        ]

    def _records(self, redis: SyncClient) -> list[WorkerRecord]:
        prefix = f"{{tandem:{self.cluster_id}}}:worker"
        names: Any = redis.smembers(f"{prefix}s")
        values: Any = [redis.get(f"{prefix}:{name.decode()}") for name in names]
        records = []
        for value in filter(None, values):
            with suppress(*UNREADABLE):
                records.append(msgspec.msgpack.decode(value, type=WorkerRecord))
        return records


def traffic_line(
    before: Mapping[str, Traffic],
    now: Mapping[str, Traffic],
    seconds: float,
    records: Collection[WorkerRecord],
) -> str:
    """Returns the line about the last `seconds` seconds; "" without traffic.

    `before` and `now` map router ids to counts, which are totals since the router's start. The line
    shows the differences. A router that is missing in `before` adds nothing to them yet. If a
    router's counts fell, the router was restarted, and its counts in `now` are the differences.
    """
    changes = [_since(before[name], counts) for name, counts in now.items() if name in before]
    loads = [record.load for record in records if record.role == "decode"]
    decoding = sum(record.load.num_decoding for record in records if record.has_kv)
    others = sum(load.num_in_prefill + load.num_waiting for load in loads)
    others += sum(counts.num_in_router for counts in now.values())
    ended = sum(counts.num_requests for counts in changes)
    if not (decoding or others or ended):
        return ""
    prompt = sum(counts.prompt_tokens for counts in changes)
    cached = sum(counts.cached_tokens for counts in changes)
    output = sum(counts.output_tokens for counts in changes)
    parts = [
        f"requests: {ended} finished, {decoding} decoding, {others} in prefill or queued",
        f"tokens/s: {prompt / seconds:,.0f} in, {output / seconds:,.0f} out",
        f"KV {_kv_use(loads):.0%} used",
    ]
    if prompt:
        parts.append(f"{cached / prompt:.0%} of the prompts cached")
    return "[dim]" + "; ".join(parts) + "[/]"


def _since(before: Traffic, now: Traffic) -> Traffic:
    if now.num_requests < before.num_requests or now.output_tokens < before.output_tokens:
        return now
    return Traffic(
        num_requests=now.num_requests - before.num_requests,
        prompt_tokens=now.prompt_tokens - before.prompt_tokens,
        cached_tokens=now.cached_tokens - before.cached_tokens,
        output_tokens=now.output_tokens - before.output_tokens,
    )


def _kv_use(loads: Collection[WorkerLoad]) -> float:
    """Returns the used share of the workers' KV pools, 0 to 1."""
    total = sum(load.blocks_total for load in loads)
    return sum(load.blocks_used for load in loads) / total if total else 0.0


def kv_tokens(records: Sequence[WorkerRecord]) -> int:
    """Returns the number of tokens whose KV the decode workers can hold together."""
    return sum(
        record.load.blocks_total * record.compatibility.block_size
        for record in records
        if record.role == "decode"
    )

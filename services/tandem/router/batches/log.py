"""The log of a batch: which router may write its results, and which lines have one.

The log is a row of objects in the file store, numbered 1, 2, 3, ... An entry is appended by
`FileStore.create` of the next number, which succeeds for one router only. That is the whole claim
on a line, and Redis takes no part in it:

    claim     a router with this term takes the batch; results of lower terms end here
    begin     the input is valid, and has this many lines
    results   these lines have a result; the payload has the lines of the output and error files
    cancel    a client cancels the batch; any router appends this
    close     no results follow

An example, in which router A stops for a while and wakes up too late:

    1 claim A   2 begin   3 results of A   4 claim B   5 results of B ...
                                           4 results of A: refused, because 4 exists

A reads entry 4, finds that B has claimed the batch, and drops its result. So the order of the log
decides, not a clock. If A had written its entry 4 first, B would have read it before it claimed the
batch with entry 5. A result is in the log once or not at all, whatever is killed. A line may run
twice, but it has one result.

Entries are never deleted before the whole batch is, because a router that slept could then write
into the gap. When the results are in their files, the entries lose their payload (`strip`).
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from tandem.net.files.store import FileStore
from tandem.router.batches.records import LineError

Kind = Literal["claim", "begin", "results", "cancel", "close"]
Why = Literal["completed", "failed", "expired", "cancelled"]
# An entry starts with a header of one line. That of most entries is shorter than this.
_HEADER_BYTES = 8 << 10
_READS_AT_ONCE = 16  # of entries
LINES_MAX = 512  # number of results in an entry, so that its header is short


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The header of an entry. `nonce` is unique: a router finds by it that an entry is its own, if
    the answer to its write was lost."""

    kind: Kind
    at: float  # seconds since the epoch
    nonce: str
    term: int = 0  # of the router that appends, except for cancel
    total: int = 0  # begin: number of lines
    lines: tuple[int, ...] = ()  # results: numbers of the lines, from 0 on
    num_failed: int = 0  # results: how many of the lines have an error
    output_bytes: int = 0  # results: bytes of the payload that go to the output file
    error_bytes: int = 0  # results: bytes after them, which go to the error file
    why: Why | None = None  # close
    errors: tuple[LineError, ...] = ()  # close: why the batch failed


class ClaimLost(Exception):
    """Another router has claimed the batch, or the batch has ended."""


class Repeated(Exception):
    """A line has a result already, because a write that was given up has succeeded meanwhile."""


@dataclass(slots=True)
class Progress:
    """The state of a batch, from the entries of its log."""

    tail: int = 0  # number of the last entry
    term: int = 0  # of the router that runs the batch
    begun_at: float = 0.0
    total: int = 0
    done: set[int] = field(default_factory=set)
    num_failed: int = 0
    cancelling_at: float = 0.0
    closed: Entry | None = None

    def apply(self, entry: Entry) -> None:
        """Takes the next entry. An entry of a lower term or after `close` has no effect."""
        self.tail += 1
        if self.closed is not None:
            return
        match entry.kind:
            case "claim":
                self.term = max(self.term, entry.term)
            case "cancel":
                self.cancelling_at = self.cancelling_at or entry.at
            case "begin" | "results" | "close" if entry.term < self.term:
                return
            case "begin":
                self.begun_at, self.total = entry.at, entry.total
            case "results":
                self.done.update(entry.lines)
                self.num_failed += entry.num_failed
            case "close":
                self.closed = entry

    @property
    def num_completed(self) -> int:
        return len(self.done) - self.num_failed


class BatchLog:
    """One reader and writer of a batch's log. Methods raise FilesUnavailable."""

    def __init__(self, store: FileStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self.progress = Progress()
        self._entries: list[Entry] = []
        self._lock = asyncio.Lock()

    async def refresh(self) -> Progress:
        """Reads the entries that others have appended."""
        async with self._lock:
            return await self._refresh()

    async def append(
        self,
        kind: Kind,
        term: int = 0,
        payload: bytes = b"",
        *,
        total: int = 0,
        lines: Sequence[int] = (),
        num_failed: int = 0,
        output_bytes: int = 0,
        why: Why | None = None,
        errors: Sequence[LineError] = (),
    ) -> None:
        """Appends an entry. Raises ClaimLost if another router has claimed the batch with a higher
        term, or if the batch is closed, and Repeated if one of the lines has a result. A cancel
        needs no term."""
        entry = Entry(
            kind=kind,
            at=time.time(),
            nonce=uuid.uuid4().hex,
            term=term,
            total=total,
            lines=tuple(lines),
            num_failed=num_failed,
            output_bytes=output_bytes,
            error_bytes=len(payload) - output_bytes,
            why=why,
            errors=tuple(errors),
        )
        data = msgspec.json.encode(entry) + b"\n" + payload
        async with self._lock:
            while True:
                progress = self.progress
                if progress.closed is not None or (kind != "cancel" and term < progress.term):
                    raise ClaimLost
                if not progress.done.isdisjoint(entry.lines):
                    raise Repeated
                number = progress.tail + 1
                if await self._store.create(self._name(number), data):
                    self._take(entry)
                    return
                await self._refresh()
                if any(each.nonce == entry.nonce for each in self._entries[number - 1 :]):
                    return

    async def payloads(self, part: Literal["output", "error"]) -> AsyncGenerator[bytes, None]:
        """Yields the results for one of the two files, in the order of the log. Raises ClaimLost if
        an entry has lost its payload, because another router has ended the batch."""
        progress = Progress()
        for number, entry in enumerate(self._entries, start=1):
            known = len(progress.done)
            progress.apply(entry)
            length = entry.output_bytes if part == "output" else entry.error_bytes
            if entry.kind != "results" or not length or len(progress.done) == known:
                continue
            data = await self._store.read(self._name(number))
            _, _, payload = (data or b"").partition(b"\n")
            if len(payload) != entry.output_bytes + entry.error_bytes:
                raise ClaimLost
            yield payload[:length] if part == "output" else payload[-length:]

    async def strip(self) -> None:
        """Removes the payloads of all entries. The results must be in their files."""
        for number, entry in enumerate(self._entries, start=1):
            if entry.kind == "results":
                await self._store.put(self._name(number), msgspec.json.encode(entry) + b"\n")

    async def _refresh(self) -> Progress:
        num_reads = 1
        while True:
            numbers = (self.progress.tail + 1 + n for n in range(num_reads))
            for entry in await asyncio.gather(*(self._read(number) for number in numbers)):
                if entry is None:
                    return self.progress
                self._take(entry)
            num_reads = min(2 * num_reads, _READS_AT_ONCE)

    async def _read(self, number: int) -> Entry | None:
        data = await self._store.read(self._name(number), 0, _HEADER_BYTES)
        if data is not None and b"\n" not in data:
            data = await self._store.read(self._name(number))
        if data is None:
            return None
        return msgspec.json.decode(data.partition(b"\n")[0], type=Entry)

    def _take(self, entry: Entry) -> None:
        self._entries.append(entry)
        self.progress.apply(entry)

    def _name(self, number: int) -> str:
        return f"{self._prefix}/{number:08}"

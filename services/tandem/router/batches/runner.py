"""Runs the batches of a cluster, in the one router that leads (leader.py).

A batch passes through these states, which its log records (log.py):

  validating    until `begin`: every line of the input file is checked
  in_progress   until `close`: lines run when there is spare capacity (gate.py)
  finalizing    until the batch has an end: the results are copied from the log to their files
  ended         completed, failed, expired or cancelled

Each step can be repeated, and a router that takes over continues at the last entry of the log. The
ids of the files of results follow from the batch's id, so two routers would write the same files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec

from tandem.common.process.cancellation import cancel
from tandem.errors import FilesUnavailable
from tandem.net.files.store import FileStore
from tandem.router.batches.files import Files
from tandem.router.batches.gate import Gate, Place
from tandem.router.batches.leader import Leader
from tandem.router.batches.lines import (
    InputLine,
    Validator,
    parse_line,
    read_lines,
    result_line,
    unanswered_line,
)
from tandem.router.batches.log import LINES_MAX, BatchLog, ClaimLost, Repeated, Why
from tandem.router.batches.records import (
    BatchEnd,
    BatchRecord,
    LineError,
    batch_end_name,
    file_name,
    log_prefix,
    new_request_id,
    open_name,
    result_file_id,
)
from tandem.router.batches.shelf import OpenBatches, read_end
from tandem.router.batches.sweep import SWEEP_S, Sweeper

log = logging.getLogger(__name__)

POLL_S = 2.0
# Without open batches, a router looks less and less often. A batch that is created here starts at
# once nevertheless. This is only the time after which a router sees a batch of a router that was
# killed.
POLL_IDLE_S_MAX = 30.0
BATCHES_AT_ONCE = 8  # the lines of this many batches take turns
LINES_AT_ONCE = 256  # of one batch, with those that wait to be tried again
# Results are written this often, so a killed router loses no more work. A batch that has run for a
# while writes them less often, because each write is an entry of the log.
FLUSH_S, _FLUSH_S_MAX = 1.0, 60.0
_FLUSH_SHARE = 1 / 60  # of the time since the router has begun to run the batch
_FLUSH_BYTES = 4 << 20
_UNWRITTEN_BYTES_MAX = 32 << 20  # no line starts while so many bytes of results wait
_RETRY_S, _RETRY_S_MAX = 1.0, 30.0
ATTEMPTS_MAX = 5  # of a line whose attempts fail, without those that were refused
_AFTER_BUG_S = 30.0
_RELEASE_S = 2.0
_INPUT_GONE = LineError("file_not_found", "the input file was deleted")
# A worker that is lost may be the line's own fault. Other codes of status 503 only mean: later.
_FAULTS_503 = ("worker_lost", "worker_left", "lease_lost", "producer_silent", "block_mismatch")


@dataclass(frozen=True, slots=True)
class LineCall:
    """One line as a call of an API."""

    record: BatchRecord
    body: dict[str, Any]
    request_id: str


@dataclass(frozen=True, slots=True)
class LineAnswer:
    status: int
    body: bytes  # JSON
    retry_after_s: float | None = None

    @property
    def code(self) -> str:
        """The code of an error; "" if there is none."""
        with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
            return str(msgspec.json.decode(self.body)["error"]["code"])
        return ""


Call = Callable[[LineCall], Awaitable[LineAnswer]]


class BatchRunner:
    """Runs the open batches while this router leads."""

    def __init__(
        self, store: FileStore, files: Files, gate: Gate, call: Call, *, body_bytes_max: int
    ) -> None:
        self.store = store
        self.files = files
        self.gate = gate
        self.call = call
        self.body_bytes_max = body_bytes_max
        self._leader = Leader(store)
        self._open = OpenBatches(store)
        self._change = asyncio.Event()  # replaced at each change, because several tasks wait
        self._tasks: dict[str, asyncio.Task[None]] = {}  # batch id -> the task that runs it
        self._paused: dict[str, float] = {}  # batch id -> when a batch may be tried again
        self._is_away = False

    def notify(self) -> None:
        """Says that a batch was created or cancelled."""
        self._change.set()
        self._change = asyncio.Event()

    async def wait_change(
        self, most_s: float = POLL_S, change: asyncio.Event | None = None
    ) -> None:
        """Returns after `change`, by default the next one, or after `most_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await (change or self._change).wait()

    async def run(self) -> None:
        """Runs until the call is cancelled. Then another router can take over at once."""
        sweeping = asyncio.create_task(self._sweep(), name="file-sweeper")
        pause_s = POLL_S
        try:
            while True:
                change = self._change  # a change during the step ends the wait after it
                try:
                    is_idle = await self._step()
                    pause_s = min(2 * pause_s, POLL_IDLE_S_MAX) if is_idle else POLL_S
                    self._is_away = False
                except FilesUnavailable as error:
                    if not self._is_away:
                        log.warning("no batch can run: %s", error.message)
                    self._is_away = True
                except Exception:  # batches must not end a router that serves other requests
                    log.exception("no batch can run because of an internal error")
                await self.wait_change(pause_s, change)
        finally:
            await cancel(sweeping, *self._tasks.values())
            with contextlib.suppress(FilesUnavailable, TimeoutError):
                async with asyncio.timeout(_RELEASE_S):
                    await self._leader.release()

    async def _step(self) -> bool:
        """Starts the batches that should run now. Returns whether no batch is open."""
        for batch_id in [name for name, task in self._tasks.items() if task.done()]:
            self._note_end(batch_id, self._tasks.pop(batch_id))
        records = await self._open.read()
        if not records and not self._tasks:
            await self._leader.rest()
            return True
        if not await self._leader.lead():
            await cancel(*self._tasks.values())
            return False
        now = time.monotonic()
        self._paused = {name: until for name, until in self._paused.items() if until > now}
        ready = [r for r in records if r.batch_id not in {*self._tasks, *self._paused}]
        for record in take_turns(ready)[: BATCHES_AT_ONCE - len(self._tasks)]:
            run = run_batch(self, record, self._leader.term)
            self._tasks[record.batch_id] = asyncio.create_task(run, name=record.batch_id)
        return False

    def _note_end(self, batch_id: str, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        pause_s = POLL_S
        if isinstance(error, ClaimLost):
            log.info("another router runs batch %s", batch_id)
        elif isinstance(error, FilesUnavailable):
            log.warning("batch %s is continued later: %s", batch_id, error.message)
        elif error is not None:
            pause_s = _AFTER_BUG_S
            log.error("batch %s stopped because of an internal error", batch_id, exc_info=error)
        if error is not None:
            self._paused[batch_id] = time.monotonic() + pause_s

    async def _sweep(self) -> None:
        sweeper = Sweeper(self.store)
        while True:
            try:
                if await sweeper.is_due() and (num := await sweeper.sweep()):
                    log.info("%d expired objects of the file store were deleted", num)
            except FilesUnavailable as error:
                log.warning("expired files could not be deleted: %s", error.message)
            except Exception:
                log.exception("expired files could not be deleted because of an internal error")
            await asyncio.sleep(SWEEP_S)


def flush_pause_s(running_s: float) -> float:
    """Returns the seconds until the next entry of results, for a batch that this router has run for
    `running_s` seconds. In 24 hours, a log gets less than 2,000 entries."""
    return max(FLUSH_S, min(_FLUSH_SHARE * running_s, _FLUSH_S_MAX))


def take_turns(records: list[BatchRecord]) -> list[BatchRecord]:
    """Orders batches so that tenants take turns, each with its oldest batch first."""
    by_tenant: OrderedDict[str, list[BatchRecord]] = OrderedDict()
    for record in records:
        by_tenant.setdefault(record.tenant, []).append(record)
    rounds = [(place, each) for own in by_tenant.values() for place, each in enumerate(own)]
    return [record for _, record in sorted(rounds, key=lambda pair: pair[0])]


async def run_batch(runner: BatchRunner, record: BatchRecord, term: int) -> None:
    """Runs a batch from its last state to its end. Raises ClaimLost and FilesUnavailable."""
    batch_log = BatchLog(runner.store, log_prefix(record.tenant, record.batch_id))
    progress = await batch_log.refresh()
    if await read_end(runner.store, record) is None:
        if progress.closed is None:
            await batch_log.append("claim", term)
            await _Run(runner, record, batch_log, term).run()
        await _finish(runner, record, batch_log)
    await runner.store.delete(open_name(record.tenant, record.batch_id))
    await batch_log.strip()


@dataclass(frozen=True, slots=True)
class _Result:
    index: int  # place of the line among those that are not empty, from 0 on
    line: bytes  # of the output or the error file
    has_failed: bool


class _Run:
    """One router's work on the lines of a batch."""

    def __init__(
        self, runner: BatchRunner, record: BatchRecord, batch_log: BatchLog, term: int
    ) -> None:
        self._runner = runner
        self._record = record
        self._log = batch_log
        self._term = term
        self._input = file_name(record.tenant, record.input_file_id)
        self._results: list[_Result] = []
        self._unwritten = 0  # bytes of `_results`
        self._written = asyncio.Event()
        self._full = asyncio.Event()
        self._lines: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Runs lines until the batch is closed."""
        if not self._log.progress.begun_at and not await self._validate():
            return
        feeding = asyncio.create_task(self._feed(), name="batch-lines")
        watching = asyncio.create_task(self._watch(), name="batch-watch")
        flushing = asyncio.create_task(self._flush_often(), name="batch-results")
        jobs: set[asyncio.Task[None]] = {feeding, watching, flushing}
        left_s = max(0.0, self._record.window_ends_at - time.time())
        why: Why = "expired"
        errors: list[LineError] = []
        try:
            done, _ = await asyncio.wait(jobs, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            for job in done:
                job.result()
            if done:
                why = "cancelled" if watching in done else "completed"
        except FileNotFoundError:
            why, errors = "failed", [_INPUT_GONE]
        finally:
            await cancel(*jobs, *self._lines)
            # Also if this task is cancelled or the store has failed: lines whose results are not in
            # the log are computed again.
            with contextlib.suppress(ClaimLost, FilesUnavailable, TimeoutError):
                async with asyncio.timeout(_RELEASE_S):
                    await self._flush()
        await self._flush()
        progress = self._log.progress
        assert why != "completed" or len(progress.done) == progress.total, "a line has no result"
        await self._log.append("close", self._term, why=why, errors=errors)

    async def _validate(self) -> bool:
        """Checks the input file. Appends `begin`, or `close` if the file has faults."""
        validator = Validator(self._record.endpoint, self._runner.body_bytes_max)
        try:
            async with aclosing(self._read_lines()) as lines:
                async for number, data in lines:
                    validator.check(data, number)
                    if validator.is_over:
                        break
                    if number % 100 == 0:
                        await asyncio.sleep(0)  # other requests must not wait for the whole file
            validator.end()
            errors = validator.errors
        except FileNotFoundError:
            errors = [_INPUT_GONE]
        if errors:
            await self._log.append("close", self._term, why="failed", errors=errors)
            return False
        await self._log.append("begin", self._term, total=validator.num_lines)
        return True

    def _read_lines(self) -> AsyncGenerator[tuple[int, bytes], None]:
        # A longer line is cut, and then has too many bytes.
        return read_lines(self._runner.store, self._input, 2 * self._runner.body_bytes_max)

    async def _feed(self) -> None:
        """Starts the lines without a result, in the order of the file, and waits for their ends."""
        room = asyncio.Semaphore(LINES_AT_ONCE)
        index = -1
        async with aclosing(self._read_lines()) as lines:
            async for _, data in lines:
                index += 1
                if index in self._log.progress.done:
                    continue
                await room.acquire()
                while self._unwritten > _UNWRITTEN_BYTES_MAX:
                    self._written.clear()
                    await self._written.wait()
                place = await self._runner.gate.enter()
                run = self._run_line(index, parse_line(data, self._record.endpoint), place)
                task = asyncio.create_task(run, name="batch-line")
                self._lines.add(task)
                task.add_done_callback(partial(self._note_end, place, room))
        while self._lines:
            await asyncio.wait(self._lines)
            await asyncio.sleep(0)  # the callbacks of the tasks run

    def _note_end(self, place: Place, room: asyncio.Semaphore, task: asyncio.Task[None]) -> None:
        place.leave()
        room.release()
        self._lines.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a line of batch %s failed", self._record.batch_id, exc_info=error)

    async def _run_line(self, index: int, line: InputLine, place: Place) -> None:
        """Runs a line until it has a result. A line that is refused is tried again."""
        num_faults = 0
        pause_s = _RETRY_S
        while True:
            request_id = new_request_id()
            try:
                answer = await self._runner.call(LineCall(self._record, line.body, request_id))
            finally:
                place.leave()
            if not _may_succeed_later(answer):
                break
            num_faults += answer.status not in (429, 503) or answer.code in _FAULTS_503
            if num_faults >= ATTEMPTS_MAX:
                break
            await asyncio.sleep(min(answer.retry_after_s or pause_s, _RETRY_S_MAX))
            pause_s = min(2 * pause_s, _RETRY_S_MAX)
            place = await self._runner.gate.enter()
        data = result_line(
            line,
            request_id=request_id,
            status=answer.status,
            body=answer.body,
            batch_line_id=f"batch_req_{request_id}",
        )
        self._results.append(_Result(index, data, answer.status != 200))
        self._unwritten += len(data)
        if self._unwritten >= _FLUSH_BYTES:
            self._full.set()

    async def _watch(self) -> None:
        """Returns when a client has cancelled the batch. Raises ClaimLost."""
        while True:
            progress = await self._log.refresh()
            if progress.term > self._term or progress.closed is not None:
                raise ClaimLost
            if progress.cancelling_at:
                return
            await self._runner.wait_change()

    async def _flush_often(self) -> None:
        began = time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(flush_pause_s(time.monotonic() - began)):
                    await self._full.wait()
            await self._flush()

    async def _flush(self) -> None:
        """Appends the results to the log. Raises ClaimLost: then the results are dropped."""
        self._full.clear()
        while self._results:
            some: list[_Result] = []
            num_bytes = 0
            for result in self._results[:LINES_MAX]:
                if some and num_bytes + len(result.line) > _FLUSH_BYTES:
                    break
                some.append(result)
                num_bytes += len(result.line)
            # A write whose answer was lost may have succeeded.
            new = [r for r in some if r.index not in (await self._log.refresh()).done]
            if new:
                # Those of the output file come first.
                new.sort(key=lambda result: result.has_failed)
                output = b"".join(r.line for r in new if not r.has_failed)
                error = b"".join(r.line for r in new if r.has_failed)
                try:
                    await self._log.append(
                        "results",
                        self._term,
                        output + error,
                        lines=[result.index for result in new],
                        num_failed=sum(result.has_failed for result in new),
                        output_bytes=len(output),
                    )
                except Repeated:  # the write of a cancelled `_flush` has succeeded just now
                    continue
            del self._results[: len(some)]
            self._unwritten -= num_bytes
            self._written.set()


def _may_succeed_later(answer: LineAnswer) -> bool:
    return answer.status in (408, 429, 499) or answer.status >= 500


async def _finish(runner: BatchRunner, record: BatchRecord, batch_log: BatchLog) -> None:
    """Writes the files of results and the end of a closed batch."""
    progress = batch_log.progress
    closed = progress.closed
    assert closed is not None
    assert closed.why is not None
    num_expired = progress.total - len(progress.done) if closed.why == "expired" else 0
    end = BatchEnd(
        status=closed.why,
        begun_at=progress.begun_at,
        cancelling_at=progress.cancelling_at,
        finalizing_at=0.0 if closed.why == "failed" else closed.at,
        total=progress.total,
        completed=progress.num_completed,
        failed=progress.num_failed + num_expired,
        errors=closed.errors,
    )
    if progress.num_completed:
        pieces = batch_log.payloads("output")
        end = msgspec.structs.replace(
            end, output_file_id=await _write_file(runner, record, pieces, is_error=False)
        )
    if end.failed:
        pieces = _error_lines(runner, record, batch_log, num_expired=num_expired)
        end = msgspec.structs.replace(
            end, error_file_id=await _write_file(runner, record, pieces, is_error=True)
        )
    end = msgspec.structs.replace(end, ended_at=time.time())
    name = batch_end_name(record.tenant, record.batch_id)
    await runner.store.put(name, msgspec.json.encode(end))
    log.info("batch %s: %s, %d of %d lines", record.batch_id, end.status, end.completed, end.total)


async def _write_file(
    runner: BatchRunner,
    record: BatchRecord,
    pieces: AsyncGenerator[bytes, None],
    *,
    is_error: bool,
) -> str:
    part: Literal["output", "error"] = "error" if is_error else "output"
    file_id = result_file_id(record.batch_id, part)
    async with aclosing(pieces):
        num_bytes = await runner.store.put_stream(file_name(record.tenant, file_id), pieces)
    await runner.files.add(
        record.tenant,
        file_id,
        filename=f"{record.batch_id}_{part}.jsonl",
        purpose="batch_output",
        num_bytes=num_bytes,
        expire_s=record.output_expires_s,
    )
    return file_id


async def _error_lines(
    runner: BatchRunner, record: BatchRecord, batch_log: BatchLog, *, num_expired: int
) -> AsyncGenerator[bytes, None]:
    async with aclosing(batch_log.payloads("error")) as pieces:
        async for piece in pieces:
            yield piece
    if not num_expired:
        return
    name = file_name(record.tenant, record.input_file_id)
    if await runner.store.size(name) is None:
        log.warning("the input file of batch %s was deleted", record.batch_id)
        return
    index = -1
    async with aclosing(read_lines(runner.store, name, 2 * runner.body_bytes_max)) as lines:
        async for _, data in lines:
            index += 1
            if index not in batch_log.progress.done:
                yield unanswered_line(
                    parse_line(data, record.endpoint).custom_id,
                    batch_line_id=f"batch_req_{new_request_id()}",
                    code="batch_expired",
                    message="This request could not be executed before the completion window "
                    "expired.",
                )

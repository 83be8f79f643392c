"""A batch has one result for each line, whatever happens to its files while it runs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tandem.common.process.cancellation import cancel
from tandem.net.files.folder import FolderStore
from tandem.net.files.store import StoredObject
from tandem.router.batches import runner as runners
from tandem.router.batches.files import Files
from tandem.router.batches.gate import Gate
from tandem.router.batches.records import BatchEnd, BatchRecord, file_name, new_batch_id
from tandem.router.batches.runner import BatchRunner, Call, LineAnswer, LineCall, run_batch
from tandem.router.batches.shelf import Batches, OpenBatches, read_end

ENDPOINT = "/v1/completions"


async def begin(store: FolderStore, call: Call, num_lines: int) -> tuple[BatchRunner, BatchRecord]:
    async def lines() -> AsyncIterator[bytes]:
        for number in range(num_lines):
            body = {"prompt": f"{number}"}
            line = {"custom_id": f"{number}", "method": "POST", "url": ENDPOINT, "body": body}
            yield json.dumps(line).encode() + b"\n"

    files = Files(store, expire_s=3600.0, file_bytes_max=1 << 20, tenant_bytes_max=0)
    file_id, _ = await files.receive("t", lines())
    now = time.time()
    record = BatchRecord(
        batch_id=new_batch_id(),
        tenant="t",
        endpoint=ENDPOINT,
        input_file_id=file_id,
        completion_window="24h",
        created_at=now,
        window_ends_at=now + 60,
        expires_at=now + 3600,
        output_expires_s=3600.0,
    )
    await Batches(store).create(record)
    gate = Gate(lambda: True)
    return BatchRunner(store, files, gate, call, body_bytes_max=1000), record


async def ended(store: FolderStore, record: BatchRecord) -> tuple[BatchEnd, list[str]]:
    """Returns the end of the batch, and the custom_ids in its output file."""
    end = await read_end(store, record)
    assert end is not None
    assert end.output_file_id is not None
    data = await store.read(file_name("t", end.output_file_id)) or b""
    return end, [json.loads(line)["custom_id"] for line in data.splitlines()]


async def test_the_input_is_deleted_while_lines_run(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "files", "files-url")

    async def call(line: LineCall) -> LineAnswer:
        await store.delete(file_name("t", line.record.input_file_id))
        return LineAnswer(200, b"{}")

    runner, record = await begin(store, call, 2)
    # The second line starts when the file is gone, and is the last one that has been read.
    runner.gate = Gate(lambda: runner.gate.num_lines == 0)
    await run_batch(runner, record, 1)
    end, _ = await ended(store, record)
    assert (end.status, [each.code for each in end.errors]) == ("failed", ["file_not_found"])


async def test_a_cancelled_write_that_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the last line ends, a write of results may be on its way. Cancelling it does not stop
    it."""
    monkeypatch.setattr(runners, "FLUSH_S", 0.05)
    writes: asyncio.Queue[asyncio.Task[bool]] = asyncio.Queue()

    class Slow(FolderStore):
        async def create(self, name: str, data: bytes) -> bool:
            if b'"results"' not in data:
                return await super().create(name, data)

            async def later() -> bool:
                await asyncio.sleep(0.1)
                return await FolderStore.create(self, name, data)

            write = asyncio.create_task(later())
            writes.put_nowait(write)
            return await asyncio.shield(write)

    async def call(line: LineCall) -> LineAnswer:
        if line.body["prompt"] == "1":
            await writes.get()  # the result of line 0 is being written
        return LineAnswer(200, b"{}")

    store = Slow(tmp_path / "files", "files-url")
    runner, record = await begin(store, call, 2)
    await run_batch(runner, record, 1)
    end, found = await ended(store, record)
    assert (end.status, sorted(found)) == ("completed", ["0", "1"])


async def test_lines_that_had_ended_when_a_run_stops_are_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another router, or this one, continues the batch."""
    monkeypatch.setattr(runners, "flush_pause_s", lambda _: 60.0)
    ran: list[str] = []
    are_waiting = asyncio.Event()

    async def call(line: LineCall) -> LineAnswer:
        ran.append(line.body["prompt"])
        if ran.count("3") == 1 and ran[-1] == "3":
            are_waiting.set()
            await asyncio.Event().wait()  # until the run is cancelled
        return LineAnswer(200, b"{}")

    store = FolderStore(tmp_path / "files", "files-url")
    runner, record = await begin(store, call, 4)
    running = asyncio.create_task(run_batch(runner, record, 1))
    await are_waiting.wait()
    await asyncio.sleep(0)  # the lines before have ended, and their results are not written yet
    await cancel(running)
    await run_batch(runner, record, 2)
    end, found = await ended(store, record)
    assert (end.status, sorted(found)) == ("completed", ["0", "1", "2", "3"])
    assert sorted(ran) == ["0", "1", "2", "3", "3"]


def test_a_long_batch_has_a_short_log() -> None:
    """Whatever is killed, at most a sixtieth of the work is repeated after the first minute."""
    num_entries, running_s = 0, 0.0
    while running_s < 24 * 3600:
        pause_s = runners.flush_pause_s(running_s)
        assert pause_s <= max(1.0, running_s / 60)
        running_s += pause_s
        num_entries += 1
    assert num_entries < 2000


async def test_a_router_without_batches_looks_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that comes then starts at once, also in a router that did not run the last one."""
    monkeypatch.setattr(runners, "POLL_S", 0.01)
    monkeypatch.setattr(runners, "POLL_IDLE_S_MAX", 60.0)
    looks: list[str] = []

    class Noting(FolderStore):
        async def objects(self, prefix: str) -> list[StoredObject]:
            looks.append(prefix)
            return await super().objects(prefix)

    async def call(line: LineCall) -> LineAnswer:
        return LineAnswer(200, b"{}")

    store = Noting(tmp_path / "files", "files-url")

    async def run_until_ended(runner: BatchRunner, record: BatchRecord) -> asyncio.Task[None]:
        running = asyncio.create_task(runner.run())
        async with asyncio.timeout(5):
            while await read_end(store, record) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return running

    first = await run_until_ended(*await begin(store, call, 1))
    await asyncio.sleep(0.2)
    looks.clear()
    await asyncio.sleep(1.0)
    assert 1 <= looks.count("open") <= 4  # after 0.16, 0.32 and 0.64 s or so
    second = await run_until_ended(*await begin(store, call, 1))
    await cancel(first, second)


async def test_a_batch_that_is_created_while_the_runner_looks_starts_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner has not seen the batch, and it has not begun to wait for changes."""
    monkeypatch.setattr(runners, "POLL_S", 20.0)
    store = FolderStore(tmp_path / "files", "files-url")
    record: BatchRecord | None = None

    async def call(line: LineCall) -> LineAnswer:
        return LineAnswer(200, b"{}")

    read = OpenBatches.read

    async def read_before_it_is_created(batches: OpenBatches) -> list[BatchRecord]:
        nonlocal record
        found = await read(batches)
        if record is None:
            _, record = await begin(store, call, 1)
            runner.notify()
        return found

    monkeypatch.setattr(OpenBatches, "read", read_before_it_is_created)
    files = Files(store, expire_s=3600.0, file_bytes_max=1 << 20, tenant_bytes_max=0)
    runner = BatchRunner(store, files, Gate(lambda: True), call, body_bytes_max=1000)
    running = asyncio.create_task(runner.run())
    try:
        async with asyncio.timeout(15.0):
            while record is None or await read_end(store, record) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        await cancel(running)

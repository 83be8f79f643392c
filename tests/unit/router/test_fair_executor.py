from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from tandem.router.request.prompt.fair_executor import FairExecutor, LateJob
from tests.harness.waiting import eventually


class Jobs:
    """Jobs on one thread, each of which ends when the test says so."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.fair = FairExecutor(lambda: ThreadPoolExecutor(1), num_workers=1)
        self._may_end = threading.Semaphore(0)
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def start(self, *names: str) -> list[asyncio.Task[str]]:
        """The first letter of a name is the tenant."""
        return [
            asyncio.create_task(self.fair.run(name[0], 1.0, self._work, name)) for name in names
        ]

    def end(self, num: int = 1) -> None:
        self._may_end.release(num)

    async def wait_begun(self, *names: str) -> None:
        """Waits until the last of these began; then these began, in this order."""
        async with asyncio.timeout(10):
            while len(self.began) < len(names):
                self._changed.clear()
                await self._changed.wait()
        assert self.began == list(names)

    def _work(self, name: str) -> str:
        self.began.append(name)
        self._loop.call_soon_threadsafe(self._changed.set)
        assert self._may_end.acquire(timeout=10)
        if name.endswith("!"):
            raise ValueError(name)
        return name


@pytest_asyncio.fixture
async def jobs() -> AsyncIterator[Jobs]:
    jobs = Jobs()
    yield jobs
    jobs.end(100)
    jobs.fair.close()


async def test_tenants_take_turns(jobs: Jobs) -> None:
    tasks = jobs.start("a0", "a1", "a2")
    await jobs.wait_begun("a0")
    tasks += jobs.start("b0")
    await asyncio.sleep(0)
    assert jobs.fair.num_waiting == 3
    jobs.end(4)
    assert await asyncio.gather(*tasks) == ["a0", "a1", "a2", "b0"]
    assert jobs.began == ["a0", "b0", "a1", "a2"]


async def test_who_leaves_takes_waiting_jobs_along(jobs: Jobs) -> None:
    tasks = jobs.start("a0", "a1", "a2", "a3")
    await jobs.wait_begun("a0")
    for task in tasks[:3]:
        task.cancel()
    await asyncio.wait(tasks[:3])
    assert jobs.fair.num_waiting == 1
    assert jobs.began == ["a0"]  # it still has its worker, although nobody waits for it
    jobs.end()
    await jobs.wait_begun("a0", "a3")
    jobs.end()
    assert await tasks[3] == "a3"


async def test_one_that_leaves_as_its_worker_comes_holds_up_nobody(jobs: Jobs) -> None:
    tasks = jobs.start("a0", "a1", "a2")
    await jobs.wait_begun("a0")
    jobs.fair._num_free += 1  # a worker comes: a1 is let go, and leaves before it hears of it
    jobs.fair._start_next()
    tasks[1].cancel()
    await asyncio.wait([tasks[1]])
    jobs.fair._num_free -= 1
    jobs.end(2)
    assert await asyncio.gather(tasks[0], tasks[2]) == ["a0", "a2"]
    assert "a1" not in jobs.began


async def test_jobs_that_fail_free_their_worker(jobs: Jobs) -> None:
    left, failed, last = jobs.start("a!", "b!", "c")
    await jobs.wait_begun("a!")
    left.cancel()
    jobs.end(3)
    results = await asyncio.gather(left, failed, last, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert isinstance(results[1], ValueError)
    assert results[2] == "c"
    assert jobs.fair._num_free == 1


def die_unless(path: str) -> int:
    """Ends the process, unless the file is there; makes it."""
    if not os.path.exists(path):
        open(path, "w").close()
        os._exit(1)
    return os.getpid()


def die() -> None:
    os._exit(1)


async def test_a_dead_process_is_replaced_once(tmp_path: object) -> None:
    made: list[ProcessPoolExecutor] = []

    def make() -> ProcessPoolExecutor:
        made.append(ProcessPoolExecutor(1))
        return made[-1]

    fair = FairExecutor(make, num_workers=1)
    try:
        assert await fair.run("a", 1.0, die_unless, f"{tmp_path}/file") != os.getpid()
        assert len(made) == 2
        with pytest.raises(BrokenExecutor):
            await fair.run("a", 1.0, die)
        assert len(made) == 4
        assert await fair.run("a", 1.0, os.getpid) != os.getpid()
        assert fair._num_free == 1
    finally:
        fair.close()


def work_long(path: Path) -> None:
    path.touch()
    time.sleep(3600)


async def test_close_ends_a_process_with_a_long_job(tmp_path: Path) -> None:
    made: list[ProcessPoolExecutor] = []

    def make() -> ProcessPoolExecutor:
        made.append(ProcessPoolExecutor(1))
        return made[-1]

    fair = FairExecutor(make, num_workers=1)
    process = psutil.Process(await fair.run("a", 1.0, os.getpid))
    running = asyncio.create_task(fair.run("a", 1.0, work_long, tmp_path / "begun"))
    await eventually(lambda: (tmp_path / "begun").exists())
    fair.close()
    with pytest.raises(BrokenExecutor):
        await running
    await eventually(lambda: not process.is_running())
    assert len(made) == 1  # no other is started for the job


async def test_a_process_that_hangs_is_ended_and_the_others_go_on(tmp_path: Path) -> None:
    fair = FairExecutor(lambda: ProcessPoolExecutor(2), num_workers=2)
    try:
        await asyncio.gather(*(fair.run("a", 1.0, time.sleep, 0.1) for _ in range(2)))  # started
        fair._deadline_s = 0.5
        late = asyncio.create_task(fair.run("a", 1.0, time.sleep, 3600))
        while fair._num_free == 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        fair._deadline_s = 60.0
        beside = asyncio.create_task(fair.run("b", 1.0, work_once, tmp_path / "begun"))
        queued = [asyncio.create_task(fair.run("c", 1.0, os.getpid)) for _ in range(3)]
        with pytest.raises(LateJob):
            await late
        assert await beside == "twice", "it ran beside the late one, and again"
        assert all(await asyncio.gather(*queued))
        assert (fair.num_late, fair._num_free) == (1, 2)
    finally:
        fair.close()


def work_once(begun: Path) -> str:
    """Waits for its end when it runs first; another run of it says so."""
    if begun.exists():
        return "twice"
    begun.touch()
    time.sleep(3600)
    return "never"


async def test_a_job_whose_client_left_is_ended_too() -> None:
    fair = FairExecutor(lambda: ProcessPoolExecutor(1), num_workers=1)
    try:
        await fair.run("a", 1.0, os.getpid)
        fair._deadline_s = 0.5
        left = asyncio.create_task(fair.run("a", 1.0, time.sleep, 3600))
        while fair._num_free:  # noqa: ASYNC110
            await asyncio.sleep(0)
        left.cancel()
        fair._deadline_s = 60.0
        assert await fair.run("b", 1.0, os.getpid)
    finally:
        fair.close()


async def test_a_thread_that_hangs_is_replaced() -> None:
    may_end = threading.Event()
    fair = FairExecutor(lambda: ThreadPoolExecutor(1), num_workers=1, deadline_s=0.2)
    try:
        with pytest.raises(LateJob):
            await fair.run("a", 1.0, may_end.wait)
        fair._deadline_s = 60.0
        assert await fair.run("b", 1.0, os.getpid) == os.getpid()
        may_end.set()
        await fair.run("b", 1.0, os.getpid)
        assert fair._num_free == 1
    finally:
        may_end.set()
        fair.close()

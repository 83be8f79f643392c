"""Runs jobs on threads or processes, so that tenants take turns.

In this module, a worker is a thread or a process of a `concurrent.futures` executor. The executor's
own queue does not know tenants. So `FairExecutor` has a queue of its own, and passes a job to the
executor only when a worker is free and it is the tenant's turn.

- If the caller of a waiting job is cancelled, the job is removed at no cost to its tenant.
- A running job cannot be stopped. If the caller is cancelled, the job still occupies a worker until
  the job ends.
- If a job misses its deadline on a process, all processes of the executor are killed. Other jobs
  that ran on these processes run once more.
- If a job misses its deadline on a thread, the thread is abandoned, because threads cannot be
  killed.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from tandem.router.admission.fair_queue import FairQueue

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class LateJob(Exception):
    """A job did not end before its deadline."""


class FairExecutor:
    """An executor behind a queue in which tenants take turns.

    The queue needs no limit: each open request waits for at most one job, and the number of open
    requests is limited.
    """

    def __init__(
        self,
        make_executor: Callable[[], Executor],
        *,
        num_workers: int,
        deadline_s: float | None = None,
    ) -> None:
        """`make_executor` is called again after a process has died or a thread was abandoned.

        `deadline_s` is the deadline of each job, measured from its start.
        """
        self._make_executor = make_executor
        self._deadline_s = deadline_s
        self.num_late = 0  # number of jobs that missed their deadline
        self._executor = make_executor()
        self._num_free = self._num_workers = num_workers
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()
        self._lost: set[asyncio.Future[Any]] = set()  # jobs on abandoned threads
        self._closed = False

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    async def run(
        self, tenant: str, cost: float, function: Callable[..., _T], *arguments: Any
    ) -> _T:
        """Returns the result of `function`. A job whose process dies is run once more.

        Raises the error of `function`, BrokenExecutor if a process dies a second time, and LateJob
        at the job's deadline.
        """
        try:
            return await self._run_once(tenant, cost, function, *arguments)
        except BrokenExecutor:
            if self._closed:
                raise
            return await self._run_once(tenant, cost, function, *arguments)

    def close(self) -> None:
        """Ends the workers.

        Processes are killed, because a process that runs a long job would outlive the router.
        """
        self._closed = True
        processes = _processes(self._executor)
        self._executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()

    async def _run_once(
        self, tenant: str, cost: float, function: Callable[..., _T], *arguments: Any
    ) -> _T:
        await self._wait_turn(tenant, cost)
        executor = self._executor
        loop = asyncio.get_running_loop()
        try:
            running = loop.run_in_executor(executor, function, *arguments)
        except BaseException as error:
            self._on_end(executor, error)
            raise
        running.add_done_callback(partial(self._on_done, executor))
        if self._deadline_s is None:
            return await asyncio.shield(running)
        in_time: asyncio.Future[_T] = loop.create_future()
        timer = loop.call_later(self._deadline_s, self._on_late, executor, running, in_time)
        running.add_done_callback(partial(_forward_result, timer, in_time))
        return await asyncio.shield(in_time)

    async def _wait_turn(self, tenant: str, cost: float) -> None:
        """Waits until a free worker is assigned to the caller."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.push(tenant, max(cost, 1.0), turn)  # FairQueue needs a positive cost
        self._start_next()
        try:
            # Without the shield, a cancellation of this task would cancel `turn` too. Then
            # `_start_next` could not set the result of `turn` any more.
            await asyncio.shield(turn)
        except asyncio.CancelledError:
            if not self._queue.remove(tenant, turn):
                self._on_end(self._executor, None)
            raise

    def _start_next(self) -> None:
        while self._queue and self._num_free:
            self._num_free -= 1
            self._queue.pop().set_result(None)

    def _on_late(
        self, executor: Executor, running: asyncio.Future[Any], in_time: asyncio.Future[Any]
    ) -> None:
        """Ends a job at its deadline, whether or not its caller still waits."""
        log.error(
            "a job that prepares a prompt did not end within %g s and is given up", self._deadline_s
        )
        self.num_late += 1
        in_time.set_exception(LateJob(f"the job did not end within {self._deadline_s:g} s"))
        if processes := _processes(executor):
            for process in processes:  # the death of a process also ends the future `running`
                process.kill()
        elif executor is self._executor and not self._closed:
            executor.shutdown(wait=False)
            self._executor = self._make_executor()
            self._num_free += 1
            self._lost.add(running)
            self._start_next()

    def _on_done(self, executor: Executor, running: asyncio.Future[Any]) -> None:
        error = None if running.cancelled() else running.exception()
        if running in self._lost:
            self._lost.remove(running)
        else:
            self._on_end(executor, error)

    def _on_end(self, executor: Executor, error: BaseException | None) -> None:
        """Frees the worker of a job that has ended, and starts the next job."""
        # Several jobs may report the same dead process; only the first one replaces the executor.
        is_lost = isinstance(error, BrokenExecutor) and executor is self._executor
        if is_lost and not self._closed:
            log.error(
                "a process that prepares prompts died; new processes are started", exc_info=error
            )
            executor.shutdown(wait=False)
            self._executor = self._make_executor()
        self._num_free += 1
        self._start_next()
        if self._num_free == self._num_workers:
            self._queue.forget()


def _processes(executor: Executor) -> list[BaseProcess]:
    """Returns the processes of an executor; empty if it uses threads."""
    # From Python 3.14 on, `ProcessPoolExecutor.kill_workers` can replace this private attribute.
    return list((getattr(executor, "_processes", None) or {}).values())


def _forward_result(
    timer: asyncio.TimerHandle, in_time: asyncio.Future[Any], running: asyncio.Future[Any]
) -> None:
    """Passes the result of a job to its caller, unless the deadline has passed."""
    timer.cancel()
    if in_time.done():
        return
    if running.cancelled():
        in_time.cancel()
    elif (error := running.exception()) is not None:
        in_time.set_exception(error)
    else:
        in_time.set_result(running.result())

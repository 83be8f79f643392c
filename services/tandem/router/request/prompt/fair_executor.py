"""Runs jobs on threads or processes; tenants take turns.

    waiting --a worker is free, and it is the tenant's turn--> running --the job ends--> over
      `-- its caller is cancelled --> over, at no cost to its tenant

A running job cannot be stopped. If its caller is cancelled, the job keeps its worker until it ends,
so there are never more jobs in the executor than workers, and the executor's own queue, which knows
no tenants, stays empty.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor
from functools import partial
from typing import Any, TypeVar

from tandem.router.admission.fair_queue import FairQueue

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class FairExecutor:
    """An executor with a fair queue before it. Each caller waits for one job at a time, so the
    bound on open requests bounds the queue."""

    def __init__(self, make_executor: Callable[[], Executor], *, num_workers: int) -> None:
        """`make_executor` is called again when a process of the executor has died."""
        self._make_executor = make_executor
        self._executor = make_executor()
        self._num_free = self._num_workers = num_workers
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()
        self._closed = False

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def warm_up(self, function: Callable[[], Any]) -> None:
        """Runs `function` now, without a turn, so that the first worker starts."""
        self._executor.submit(function)

    async def run(
        self, tenant: str, cost: float, function: Callable[..., _T], *arguments: Any
    ) -> _T:
        """Returns what `function` returns. A job whose process dies is run once more.

        Raises what `function` raises, and BrokenExecutor if a process dies a second time.
        """
        try:
            return await self._run_once(tenant, cost, function, *arguments)
        except BrokenExecutor:
            if self._closed:
                raise
            return await self._run_once(tenant, cost, function, *arguments)

    def close(self) -> None:
        """Ends the workers. Processes are killed: one that still starts, or runs a long job, would
        outlive its router."""
        self._closed = True
        # Python has `kill_workers` from 3.14 on.
        processes = list((getattr(self._executor, "_processes", None) or {}).values())
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
        return await asyncio.shield(running)

    async def _wait_turn(self, tenant: str, cost: float) -> None:
        """Returns when one of the free workers is the caller's."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.push(tenant, max(cost, 1.0), turn)  # what has no text costs a turn, too
        self._let_go()
        try:
            # Shielded: `_let_go` may give a worker to a caller that is being cancelled.
            await asyncio.shield(turn)
        except asyncio.CancelledError:
            if not self._queue.remove(tenant, turn):
                self._on_end(self._executor, None)
            raise

    def _let_go(self) -> None:
        while self._queue and self._num_free:
            self._num_free -= 1
            self._queue.pop().set_result(None)

    def _on_done(self, executor: Executor, running: asyncio.Future[Any]) -> None:
        self._on_end(executor, None if running.cancelled() else running.exception())

    def _on_end(self, executor: Executor, error: BaseException | None) -> None:
        """Frees the worker of a job that is over."""
        # Several jobs may tell of the same dead process.
        is_lost = isinstance(error, BrokenExecutor) and executor is self._executor
        if is_lost and not self._closed:
            log.error("a process died; starting anew", exc_info=error)
            executor.shutdown(wait=False)
            self._executor = self._make_executor()
        self._num_free += 1
        self._let_go()
        if self._num_free == self._num_workers:
            self._queue.forget()

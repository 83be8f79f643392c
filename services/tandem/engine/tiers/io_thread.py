"""A thread that runs the jobs of a tier, one after the other, in the order they came."""

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

log = logging.getLogger(__name__)

_NICE = 5  # behind the engine's thread where both want a core


class JobThread(Protocol):
    """Runs jobs apart from the engine."""

    def submit(self, job: Callable[[], object]) -> None:
        """Queues a job. It catches its own errors."""

    def close(self, deadline_s: float) -> None:
        """Waits until the queued jobs are done, for so long at most, and ends the thread."""


class IoThread:
    def __init__(self, name: str, on_job_end: Callable[[], object] = lambda: None) -> None:
        """`on_job_end` runs in the thread after each job."""
        self._on_job_end = on_job_end
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], object]) -> None:
        self._jobs.put(job)

    def close(self, deadline_s: float) -> None:
        self._jobs.put(None)
        self._thread.join(deadline_s)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # of a thread: Linux counts niceness by thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException:  # a bug, or a panic in obstore: what waits has a deadline
                log.exception("a job of %s failed", threading.current_thread().name)
            self._on_job_end()

"""A thread that runs the jobs of a tier one after the other, in the order of submission."""

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

log = logging.getLogger(__name__)

_NICE = 5  # lowers the priority, so that the engine's thread goes first when both need a core


class JobThread(Protocol):
    """Runs jobs outside the engine's thread."""

    def submit(self, job: Callable[[], object]) -> None:
        """Queues a job. The job handles its own errors."""

    def close(self, deadline_s: float) -> None:
        """Waits at most `deadline_s` seconds for the queued jobs, and ends the thread."""


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
        with contextlib.suppress(OSError):  # on Linux this lowers the priority of this thread only
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while (job := self._jobs.get()) is not None:
            try:
                job()
            # A bug, or a panic in obstore. Code that waits for this job has a deadline.
            except BaseException:
                log.exception("a job of the thread %s failed", threading.current_thread().name)
            self._on_job_end()

"""Lowers the priority of a thread for a while, so that others go first when cores are scarce."""

from __future__ import annotations

import os
import threading

_STEPS = 10  # by so much is the nice value higher, of which a share of the cores follows


class LowPriority:
    """A context in which the calling thread has a lower priority.

    Any thread may lower its priority, but it needs CAP_SYS_NICE or a limit RLIMIT_NICE to raise it
    again. Without this right, the context changes nothing.
    """

    def __init__(self) -> None:
        self._may_raise = _may_raise()
        self._before = 0

    def __enter__(self) -> None:
        if self._may_raise:
            self._before = os.getpriority(os.PRIO_PROCESS, 0)  # on Linux, of this thread only
            os.setpriority(os.PRIO_PROCESS, 0, self._before + _STEPS)

    def __exit__(self, *error: object) -> None:
        if self._may_raise:
            os.setpriority(os.PRIO_PROCESS, 0, self._before)


def _may_raise() -> bool:
    """Lowers and raises the priority of a thread that does nothing else."""
    found = []

    def probe() -> None:
        before = os.getpriority(os.PRIO_PROCESS, 0)
        try:
            os.setpriority(os.PRIO_PROCESS, 0, before + 1)
            os.setpriority(os.PRIO_PROCESS, 0, before)
        except PermissionError:
            return
        found.append(True)

    thread = threading.Thread(target=probe, name="priority-probe")
    thread.start()
    thread.join()
    return bool(found)

"""Stops a foreground program on signals or at the end of its parent."""

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


class Interrupted(BaseException):
    """Raised in the main thread by the first stop signal. Later signals are ignored."""


@contextmanager
def stop_signals(*, parent_pid: int | None = None) -> Iterator[None]:
    """Converts stop signals to `Interrupted` within the `with` statement.

    If `parent_pid` is given, it must be the pid of this process's parent. The end of the parent
    then counts as SIGTERM.
    """
    before = {number: signal.signal(number, _interrupt) for number in _STOP}
    try:
        if parent_pid is not None:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0):
                why = os.strerror(ctypes.get_errno())
                raise OSError(
                    f"this process cannot be set to end together with its parent process: {why}"
                )
            if os.getppid() != parent_pid:  # the parent has already ended
                raise Interrupted
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, _: FrameType | None) -> None:
    for other in _STOP:
        signal.signal(other, signal.SIG_IGN)
    raise Interrupted(signal.Signals(number).name)

"""Stops a program in the foreground by signals, or by the end of its parent."""

import ctypes
import os
import signal
from types import FrameType
from typing import Self

_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


class Interrupted(BaseException):
    """Raised in the main thread by the first signal; later ones are ignored: it stops already."""


class StopSignals:
    """Turns stop signals into `Interrupted` while open; at its end the old handlers are back."""

    def __init__(self, *, parent_pid: int | None = None) -> None:
        """`parent_pid` makes the end of that process, which must be our parent, a SIGTERM."""
        self._parent_pid = parent_pid
        self._before = {number: signal.getsignal(number) for number in _STOP}

    def __enter__(self) -> Self:
        for number in _STOP:
            signal.signal(number, _interrupt)
        if self._parent_pid is not None:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0):
                raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
            if os.getppid() != self._parent_pid:  # it ended before it could be asked for
                raise Interrupted
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _interrupt(number: int, _: FrameType | None) -> None:
    for other in _STOP:
        signal.signal(other, signal.SIG_IGN)
    raise Interrupted(signal.Signals(number).name)

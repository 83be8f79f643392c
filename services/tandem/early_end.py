"""The end of a program that is told to stop before it has signal handlers of its own."""

import os
import signal

_STATUS = 128 + signal.SIGTERM  # as a shell reports it


def end_on_sigterm() -> None:
    """Ends the process at once at SIGTERM, until another handler replaces this one.

    The kernel drops a signal to the first process of a container if the process has no handler for
    it. Without this one, a pod that is deleted while its program loads would run until its grace
    period is over.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(_STATUS))

"""Lets SIGTERM and Ctrl-C end a program that still loads or has no signal handlers of its own.

`python -m tandem.common.process.early_end MODULE ARGUMENT...` runs a program so that Ctrl-C ends it
without a traceback.
"""

import os
import runpy
import signal
import sys
from collections.abc import Callable

_STATUS = 128 + signal.SIGTERM  # the status that a shell reports for a process that SIGTERM ended
_INTERRUPTED = 128 + signal.SIGINT


def end_on_sigterm() -> None:
    """Installs a handler with which SIGTERM ends the process at once. The program may later replace
    the handler.

    The kernel drops a signal to the first process of a container if the process has no handler for
    it. Without this handler, a pod that is deleted while its program loads would run until its
    grace period ends.

    Python itself takes a while to load. So the chart starts programs with SIGTERM blocked (`env
    --block-signal`): a SIGTERM that arrives early waits until this function unblocks it.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(_STATUS))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def quietly(main: Callable[[], int | None]) -> None:
    """Runs `main` and exits with its result, or with 130 at Ctrl-C (SIGINT) without a traceback."""
    try:
        status = main()
    except KeyboardInterrupt:
        sys.stderr.write("\n")  # ends the line on which the terminal has printed ^C
        status = _INTERRUPTED
    sys.exit(status)


def _program() -> None:
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    quietly(_program)

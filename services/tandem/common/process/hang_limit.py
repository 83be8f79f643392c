"""Ends this process if a step of it hangs, even one that holds Python's interpreter.

Nothing else can see that from inside: neither the event loop nor a thread runs then. The stacks of
all threads go to standard error first.
"""

import faulthandler
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hang_limit(seconds: float) -> Iterator[None]:
    """Ends the process with status 1 unless the body ends in time. A process has one at a time."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()

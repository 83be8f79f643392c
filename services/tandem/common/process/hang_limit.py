"""Ends this process if a piece of code hangs, even if that code holds the GIL.

The event loop and Python threads cannot detect such a hang, because they also need the GIL. Before
the process ends, the stacks of all threads are written to stderr.
"""

import faulthandler
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hang_limit(seconds: float) -> Iterator[None]:
    """Ends the process with status 1 unless the body of the `with` statement ends in time. It
    cannot be nested."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()

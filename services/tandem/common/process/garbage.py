"""Keeps Python's garbage collector from pausing a process that serves, and memory that only the
start needed from staying with the process.

A full collection visits every tracked object. Modules, a tokenizer and an API's schemas are some
hundred thousand objects. Visiting them takes 50 to 200 ms, and none of them is ever garbage.

While a process loads a tokenizer, it needs some 30 MB for a moment. glibc would keep this memory.
"""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_LIBC = ctypes.CDLL(None)


@contextmanager
def without_collection() -> Iterator[None]:
    """Context manager for imports: no garbage is collected meanwhile, and objects that the imports
    create are excluded from later collections.

    The collections would find no garbage and take a tenth of the time of the imports.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def exempt_loaded() -> None:
    """Excludes all existing objects from later collections, and returns free memory to the system.
    It should be called once everything is loaded."""
    gc.collect()
    gc.freeze()
    # Python starts the next full collection when there are more new objects than a quarter of the
    # objects that survived the last one. The first call has some hundred thousand survivors, so
    # much garbage could pile up. Frozen objects do not count, so the second call has few survivors.
    gc.collect()
    with suppress(AttributeError):  # only glibc has this function
        _LIBC.malloc_trim(0)

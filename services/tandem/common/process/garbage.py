"""Keeps Python's garbage collector from pausing a process that serves.

A full collection visits every tracked object. Modules, a tokenizer and an API's schemas are some
hundred thousand objects, which takes 50 to 200 ms, and none of them is ever garbage.
"""

import gc


def exempt_loaded() -> None:
    """Excludes all existing objects from later collections. Call it once everything is loaded."""
    gc.collect()
    gc.freeze()
    # A full collection starts once a quarter of the objects that survived the last one was added.
    # This one leaves almost none, so the next does not wait for a quarter of the frozen ones.
    gc.collect()

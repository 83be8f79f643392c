"""Keeps Python's garbage collector from pausing a process that serves.

A full collection goes through every object that it knows. Modules, a tokenizer and an API's schemas
are some hundred thousand of them, which takes 50 to 200 ms, and none of them is ever garbage.
"""

import gc


def exempt_loaded() -> None:
    """Exempts every object of now from later collections; call it once all is loaded."""
    gc.collect()
    gc.freeze()
    # A full collection waits until a quarter of what the last one found has been added. This one
    # finds almost nothing, so that later garbage does not wait for a quarter of what is frozen.
    gc.collect()

"""Keeps Python's garbage collector from pausing a process that serves.

A full collection goes through every object that it knows. Modules, a tokenizer and an API's schemas
are some hundred thousand of them, which takes 50 to 200 ms, and none of them is ever garbage.
"""

import gc

# Collections of the middle generation before a full one. Python's 10 are a full collection every
# few seconds while connections come and go; young garbage does not wait for it.
_FULL_AFTER = 100


def exempt_loaded() -> None:
    """Exempts every object of now from later collections; call it once all is loaded."""
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _FULL_AFTER)

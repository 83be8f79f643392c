"""Memory that was freed, but not given back to the system.

glibc keeps freed blocks of up to 32 MiB for later ones. A process that loads weights frees as much
in converted tensors as it keeps.
"""

from __future__ import annotations

import ctypes

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it


def give_back_freed() -> None:
    """Gives whole free pages back to the system."""
    if _trim is not None:
        _trim(0)

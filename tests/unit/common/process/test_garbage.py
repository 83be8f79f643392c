"""Garbage collections do not search what a process has loaded, and its free memory is returned."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
from tandem.common.process.garbage import exempt_loaded
loaded = [[] for _ in range(1000)]
exempt_loaded()
known = {id(one) for one in gc.get_objects()}
assert not any(id(one) in known for one in loaded)
later = []
later.append(later)
del later
assert gc.collect() == 1
"""


def test_what_was_loaded_is_exempt_and_later_garbage_is_collected() -> None:
    # In a process of its own: the exemption cannot be taken back for a part of the objects.
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)


FREED = """
import re
from pathlib import Path
from tandem.common.process.garbage import exempt_loaded

def resident_kib() -> int:
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

blocks = [bytes(4000) for _ in range(20_000)]  # each is smaller than what glibc maps on its own
last = bytes(4000)  # glibc itself returns only what is free above the last block
full = resident_kib()
del blocks
exempt_loaded()
assert resident_kib() < full - 60_000, (full, resident_kib())
"""


def test_memory_that_was_freed_is_returned() -> None:
    subprocess.run([sys.executable, "-c", FREED], check=True, timeout=60)

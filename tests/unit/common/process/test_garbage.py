"""Later garbage collections do not search what a process has loaded."""

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

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tandem.common.process.priority import LowPriority

# Prints the priority within the context and after it. With an argument, without any right.
SCRIPT = """
import os, sys
from tandem.common.process.priority import LowPriority
if len(sys.argv) > 1:
    os.setgid(65534), os.setuid(65534)
with LowPriority():
    print(os.getpriority(os.PRIO_PROCESS, 0))
print(os.getpriority(os.PRIO_PROCESS, 0))
"""


def priorities(*words: str) -> list[int]:
    command = [sys.executable, "-c", SCRIPT, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.split()]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change its user")
def test_a_thread_that_could_not_raise_its_priority_keeps_it() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    assert priorities("nobody") == [before, before]


def test_the_priority_is_lower_within_the_context_only() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    within, after = priorities()
    assert after == before
    if within == before:
        pytest.skip("this user has no right to raise a priority")
    assert within == min(before + 10, 19)
    with pytest.raises(ZeroDivisionError), LowPriority():
        raise ZeroDivisionError
    assert os.getpriority(os.PRIO_PROCESS, 0) == before

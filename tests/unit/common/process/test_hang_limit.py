"""A process that hangs ends itself, whatever holds it."""

import subprocess
import sys

import pytest

from tandem.common.process.hang_limit import hang_limit

HANG = {
    "the interpreter is held": "re.match('(a|aa)+$', 'a' * 100 + '!')",
    "a thread waits": "threading.Event().wait()",
}


@pytest.mark.parametrize("how", HANG)
def test_a_process_that_hangs_ends_and_says_where_it_was(how: str) -> None:
    program = (
        "import re, threading\nfrom tandem.common.process.hang_limit import hang_limit\n"
        f"def hangs():\n  with hang_limit(0.5):\n    {HANG[how]}\n"
        "thread = threading.Thread(target=hangs)\nthread.start()\nthread.join()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert ended.returncode == 1
    assert b"in hangs" in ended.stderr


def test_what_ends_in_time_is_left_alone() -> None:
    with hang_limit(60):
        pass

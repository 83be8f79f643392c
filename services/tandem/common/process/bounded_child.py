"""Runs a short program whose input comes from outside, within bounds of time and memory."""

import resource
import subprocess
from collections.abc import Sequence
from contextlib import suppress


def run_bounded(
    command: Sequence[str], told: bytes, *, cpu_s: int, memory_bytes: int, deadline_s: float
) -> tuple[bytes, int]:
    """Returns what the program prints before it ends or is ended, and its exit status (negative: a
    signal's number). It reads `told` from standard input, before it does anything else.

    `deadline_s` is for a machine that is busy: it should be long beside `cpu_s`.
    """
    bounds = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CORE: 0,
    }
    child = subprocess.Popen(
        command, env={}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with child:
        for bound, largest in bounds.items():
            with suppress(ProcessLookupError):  # it has ended already
                _, hard = resource.prlimit(child.pid, bound)
                if hard == resource.RLIM_INFINITY or largest < hard:
                    resource.prlimit(child.pid, bound, (largest, largest))
        try:
            output, _ = child.communicate(told, deadline_s)
        except subprocess.TimeoutExpired:
            child.kill()
            output, _ = child.communicate()
    return output, child.returncode

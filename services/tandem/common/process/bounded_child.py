"""Runs a short program on untrusted input, with limits of time and memory."""

import resource
import subprocess
from collections.abc import Sequence
from contextlib import suppress


def run_bounded(
    command: Sequence[str], stdin: bytes, *, cpu_s: int, memory_bytes: int, deadline_s: float
) -> tuple[bytes, int]:
    """Runs a program with `stdin` as its input. Returns the program's output and exit status.

    A negative status is the number of the signal that ended the program. The limits are set after
    the program has started, and its input is sent only then. So a program that first reads its
    input does all its other work under the limits.

    `cpu_s` limits CPU time, `deadline_s` elapsed time. On a busy machine a program may wait for a
    CPU, so `deadline_s` should be much longer than `cpu_s`.
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
            with suppress(ProcessLookupError):  # the program has already ended
                _, hard = resource.prlimit(child.pid, bound)
                if hard == resource.RLIM_INFINITY or largest < hard:
                    resource.prlimit(child.pid, bound, (largest, largest))
        try:
            output, _ = child.communicate(stdin, deadline_s)
        except subprocess.TimeoutExpired:
            child.kill()
            output, _ = child.communicate()
    return output, child.returncode

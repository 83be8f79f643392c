"""Finds out how another process ended, even if it is not a child of this one, and whether it is
stopped.

Until the parent has reaped an ended process, /proc has the exit status. After that, Linux 6.15 and
later report the status to any process that has a pidfd. Older systems report it only to the parent.
"""

import fcntl
import os
import signal
import struct
import time
from pathlib import Path

# The ioctl PIDFD_GET_INFO of linux/pidfd.h. The number includes 64, the size of the first version
# of `struct pidfd_info`.
_GET_INFO = 0xC040FF0B
_INFO_EXIT = 1 << 3
_INFO = struct.Struct("QQ11Ii")
_REAPED_S = 0.5


def ending(pid: int, pidfd: int, oom_kills_before: int | None) -> str:
    """Describes how a process ended, such as `exit status 1` or `ended by SIGKILL`.

    Returns "" if the system does not report how the process ended. `oom_kills_before` is the result
    of a call of `oom_kills` while the process still ran.
    """
    give_up_at = time.monotonic() + _REAPED_S
    while (status := _zombie_status(pid, pidfd)) is None:
        if (status := _exit_status(pidfd)) is not None:
            break
        if time.monotonic() > give_up_at:
            return ""
        time.sleep(0.01)
    return describe_exit(os.waitstatus_to_exitcode(status), oom_kills_before)


def describe_exit(exit_code: int, oom_kills_before: int | None) -> str:
    """Describes an exit code. A negative code is the number of a signal."""
    if exit_code >= 0:
        return f"exit status {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    if -exit_code == signal.SIGKILL and oom_kills_before is not None:
        now = oom_kills()
        if now is not None and now > oom_kills_before:
            return "ended by SIGKILL of Linux's OOM killer, because memory ran out"
    return f"ended by {name}"


def oom_kills() -> int | None:
    """Returns the number of processes that the OOM killer has killed since boot; None if the
    system does not report it."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    return next((int(x.split()[1]) for x in lines if x.startswith("oom_kill ")), None)


def is_stopped(pid: int) -> bool:
    """Returns whether a process is stopped, for example by SIGSTOP or a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


def _zombie_status(pid: int, pidfd: int) -> int | None:
    """Returns the wait status of a process that has ended and that its parent has not reaped; None
    for other processes."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        signal.pidfd_send_signal(pidfd, 0)  # checks that no other process has this pid now
    except (OSError, ProcessLookupError):
        return None
    return int(fields[-1]) if fields[0] == "Z" else None


def _exit_status(pidfd: int) -> int | None:
    """Returns the wait status of a reaped process, as wait(2) does; None if the system does not
    report it."""
    info = bytearray(_INFO.pack(_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(info)
    return status if mask & _INFO_EXIT else None

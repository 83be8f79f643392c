"""Checks the clock: the cost of reading it, and its synchronization."""

import ctypes

from tandem.ops.doctor.host import Finding, HostFiles
from tandem.router.workers.troubles import CLOCK_OFF_S

_FAST_SOURCES = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page")
_UNSYNCHRONIZED = 0x40  # STA_UNSYNC in linux/timex.h


class _Timex(ctypes.Structure):
    """The first fields of `struct timex`, padded to its size. With `modes` 0, adjtimex(2) changes
    nothing."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("others", ctypes.c_long * 64),
    )


def clock(host: HostFiles) -> Finding:
    """Checks that the clock source can be read without a system call."""
    source = host.text("sys/devices/system/clocksource/clocksource0/current_clocksource")
    cost = "each reading of the clock is a system call, several in each step"
    remedy = "`clocksource=tsc` on the kernel's command line, if the machine's TSC is stable"
    if source in _FAST_SOURCES:
        return Finding("clock", source)
    return Finding("clock", source or "unknown", cost, remedy)


def kernel_clock_status() -> int | None:
    """Returns the status flags of the kernel's clock (adjtimex(2)); None if they are not
    available."""
    try:
        adjtimex = ctypes.CDLL(None).adjtimex
    except AttributeError:
        return None
    timex = _Timex()
    return int(timex.status) if adjtimex(ctypes.byref(timex)) >= 0 else None


def time_sync(host: HostFiles) -> Finding:
    """Checks that the clock is synchronized.

    The kernel's flag has priority, but its value "not synchronized" may be wrong: chrony without
    `rtcsync` does not change the flag. In this case the time daemons of this host are checked, too.
    A container does not show the daemon that sets the host's clock."""
    name = "time sync"
    status = kernel_clock_status()
    if status is not None and not status & _UNSYNCHRONIZED:
        return Finding(name, "the kernel's clock is synchronized")
    if (host.root / "run/systemd/timesync/synchronized").exists():
        return Finding(name, "by systemd-timesyncd")
    if any(host.root.glob("run/chrony/chronyd.*")):
        return Finding(name, "not known: chrony runs, and `chronyc tracking` tells")
    if status is None or host.in_container:
        return Finding(name, "not known here: look at the machine itself")
    cost = (
        f"the clock drifts: {CLOCK_OFF_S:g} s off the others', routers name this host's workers as "
        "in trouble"
    )
    return Finding(name, "not synchronized", cost, "run chrony or systemd-timesyncd")

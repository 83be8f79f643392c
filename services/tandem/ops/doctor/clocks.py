"""Checks that reading the clock is cheap, and that the clock is synchronized with other hosts."""

import ctypes

from tandem.ops.doctor.host import Finding, HostFiles
from tandem.router.workers.troubles import CLOCK_OFF_S

_FAST_SOURCES = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page")
_UNSYNCHRONIZED = 0x40  # STA_UNSYNC in linux/timex.h


class _Timex(ctypes.Structure):
    """The first fields of `struct timex` of adjtimex(2), and padding up to the size of the struct.
    With `modes` 0, adjtimex only reads."""

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
    """Checks that a program can read the clock without a system call, which depends on the kernel's
    clock source."""
    source = host.text("sys/devices/system/clocksource/clocksource0/current_clocksource")
    cost = "each reading of the clock is a system call, and each engine step reads it several times"
    remedy = "add `clocksource=tsc` to the kernel's command line, if the machine's TSC is stable"
    if source in _FAST_SOURCES:
        return Finding("clock", source)
    return Finding("clock", source or "unknown", cost, remedy)


def kernel_clock_status() -> int | None:
    """Returns the status flags of the kernel's clock, or None if the C library has no adjtimex(2)
    or the call fails."""
    try:
        adjtimex = ctypes.CDLL(None).adjtimex
    except AttributeError:
        return None
    timex = _Timex()
    return int(timex.status) if adjtimex(ctypes.byref(timex)) >= 0 else None


def time_sync(host: HostFiles) -> Finding:
    """Checks that the clock is synchronized with other hosts.

    The kernel's status "synchronized" is reliable. The status "not synchronized" may be wrong,
    because chrony without `rtcsync` does not inform the kernel. In this case the check looks for
    time daemons of the host. In a container such daemons are not visible, and the result is
    "not known".
    """
    name = "time sync"
    status = kernel_clock_status()
    if status is not None and not status & _UNSYNCHRONIZED:
        return Finding(name, "the kernel's clock is synchronized")
    if (host.root / "run/systemd/timesync/synchronized").exists():
        return Finding(name, "synchronized by systemd-timesyncd")
    if any(host.root.glob("run/chrony/chronyd.*")):
        return Finding(
            name,
            "unknown: chrony runs, and `chronyc tracking` shows whether the clock is synchronized",
        )
    if status is None or host.in_container:
        return Finding(name, "unknown: it is not visible from here; check it on the host itself")
    cost = (
        "the clock drifts; once it differs from other hosts by more than "
        f"{CLOCK_OFF_S:g} s, routers report a problem with this host's workers"
    )
    return Finding(name, "not synchronized", cost, "run chrony or systemd-timesyncd")

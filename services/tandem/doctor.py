"""`tandem doctor`: what this host lacks, and what each lack costs. It changes nothing.

Each check reads files below a root, so that tests give it other hosts. A lack never stops Tandem:
exit status 0 in any case.
"""

import os
import resource
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from tandem.memory import read_memory
from tandem.transfer.nixl.agent import PACKAGES
from tandem.transfer.nixl.reach import host_identity

_CONNECTIONS = 4096  # of --connections-max, over HTTP and as many over gRPC
_OTHER_FILES = 256
_SHARED_MIN = 64 << 20
_KERNEL_MIN = (5, 6)  # pidfd_open and pidfd_getfd


@dataclass(frozen=True, slots=True)
class Finding:
    """`cost` says what is lost; it is empty if nothing is."""

    name: str
    found: str
    cost: str = ""


@dataclass(frozen=True, slots=True)
class Host:
    """The host as its files and this process's environment show it."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def text(self, path: str) -> str:
        """Returns a file's text without its last newline; empty if there is none."""
        try:
            return (self.root / path).read_text().strip()
        except OSError:
            return ""


def kernel(host: Host) -> Finding:
    release = host.text("proc/sys/kernel/osrelease")
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdecimal())
    old = bool(numbers) and numbers < _KERNEL_MIN
    return Finding("kernel", release, "`tandem up` cannot watch its processes" if old else "")


def huge_pages(host: Host) -> Finding:
    told = host.text("sys/kernel/mm/transparent_hugepage/enabled")
    chosen = told.partition("[")[2].partition("]")[0] or "unknown"
    cost = "weights and KV lie in small pages: CPU workers compute more slowly"
    return Finding("huge pages", chosen, cost if chosen in ("never", "unknown") else "")


def nixl(host: Host) -> Finding:
    packages = (name.partition(".")[0] for name in PACKAGES)
    found = next((name for name in packages if find_spec(name) is not None), None)
    if found is None:
        return Finding("NIXL", "not installed", "blocks travel by gRPC, which is slower")
    return Finding("NIXL", f"{found}, UCX_TLS={host.environment.get('UCX_TLS', 'all')}")


def memory_reads(host: Host) -> Finding:
    identity = host_identity(root=host.root, environment=host.environment)
    scope = host.text("proc/sys/kernel/yama/ptrace_scope") or "none"
    cost = "workers of this host exchange blocks by gRPC: the kernel lets none read another (CMA)"
    return Finding("CMA", f"ptrace scope {scope}", "" if identity.cma else cost)


def rdma(host: Host) -> Finding:
    has = host_identity(root=host.root, environment=host.environment).rdma
    cost = "between hosts, blocks travel by gRPC (or NIXL over TCP with --nixl-tcp insecure)"
    return Finding("RDMA", "a port is active" if has else "no active port", "" if has else cost)


def gpus(host: Host) -> Finding:
    has = (host.root / "dev/nvidiactl").exists()
    return Finding("GPU", "NVIDIA" if has else "none", "" if has else "workers compute on the CPU")


def clock(host: Host) -> Finding:
    source = host.text("sys/devices/system/clocksource/clocksource0/current_clocksource")
    slow = source not in ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page")
    cost = "each reading of the clock is a system call, several in each step"
    return Finding("clock", source or "unknown", cost if slow else "")


def open_files(host: Host) -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a router raises its soft limit itself
    if hard == resource.RLIM_INFINITY:
        return Finding("open files", "unlimited")
    needed, room = 2 * _CONNECTIONS + _OTHER_FILES, max(1, (hard - _OTHER_FILES) // 2)
    cost = f"a router takes {room} connections, not {_CONNECTIONS}; {needed} files are enough"
    return Finding("open files", str(hard), cost if hard < needed else "")


def shared_memory(host: Host) -> Finding:
    place = host.root / "dev/shm"
    free = shutil.disk_usage(place).free if place.is_dir() else 0
    cost = "Ray's head may not start (`docker run --shm-size`)"
    return Finding("/dev/shm", f"{free / 1e6:.0f} MB free", cost if free < _SHARED_MIN else "")


def memory(host: Host) -> Finding:
    now = read_memory()
    low = now.free_bytes < now.total_bytes // 20
    found = f"{now.free_bytes / 1e9:.1f} of {now.total_bytes / 1e9:.1f} GB free"
    return Finding("memory", found, "Linux may end the largest process" if low else "")


CHECKS: tuple[Callable[[Host], Finding], ...] = (
    *(kernel, memory, huge_pages, shared_memory, open_files, clock),
    *(gpus, nixl, memory_reads, rdma),
)


def main() -> None:
    """Prints a line for each check, with what a lack costs."""
    findings = [check(Host()) for check in CHECKS]
    for finding in findings:
        verdict = "!" if finding.cost else "ok"
        print(f"{verdict:2}  {finding.name:<12} {finding.found}")
        if finding.cost:
            print(f"{'':4}{'':12} costs: {finding.cost}")
    num_lacks = sum(bool(finding.cost) for finding in findings)
    print(f"{num_lacks} of {len(findings)} checks found a lack; Tandem runs all the same")


if __name__ == "__main__":
    main()

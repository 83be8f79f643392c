"""How the NIXL agents of two workers would reach each other: by memory, by RDMA or only by TCP.

    same machine and PID namespace, same user, CMA allowed on both --> MEMORY
    both have an active RDMA port                                  --> RDMA
    else                                                           --> TCP

UCX decides by itself and says nothing of it; this is what it decides by. It matters because over
TCP a source that its reader leaves in mid-read can abort (nixl_source.py), and gRPC was faster.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

import msgspec

_MEMORY_TRANSPORTS = {"all", "sm", "shm", "cma"}  # UCX's names
_RDMA_TRANSPORTS = {"all", "ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "dc", "dc_x", "ud"}
_CAP_SYS_PTRACE = 19


class Reach(Enum):
    """The value is the sentence for people."""

    MEMORY = "the two read each other's memory: one machine, one PID namespace, one user"
    RDMA = "both have an active RDMA port"
    TCP = "only TCP: no shared machine, PID namespace and user, and no RDMA port on both sides"


class HostIdentity(msgspec.Struct, frozen=True):
    """What a process says of itself, so that a peer can tell how the two reach each other."""

    boot_id: str  # of the machine's kernel, new at each boot
    pid_namespace: str
    uid: int
    cma: bool  # the kernel and UCX_TLS allow that another process of the same user reads here
    rdma: bool  # an RDMA device with an active port, and UCX_TLS allows it


def reach(ours: HostIdentity, theirs: HostIdentity) -> Reach:
    """By what UCX would move bytes between the two."""
    here = (ours.boot_id, ours.pid_namespace, ours.uid)
    there = (theirs.boot_id, theirs.pid_namespace, theirs.uid)
    if ours.boot_id and here == there and ours.cma and theirs.cma:
        return Reach.MEMORY
    return Reach.RDMA if ours.rdma and theirs.rdma else Reach.TCP


def host_identity(
    root: Path = Path("/"), environment: Mapping[str, str] = os.environ
) -> HostIdentity:
    """Of this process, and of the ones it starts. `root` is where proc and sys are mounted."""
    allowed = environment.get("UCX_TLS", "all")
    return HostIdentity(
        boot_id=_text(root / "proc/sys/kernel/random/boot_id"),
        pid_namespace=_link(root / "proc/self/ns/pid"),
        uid=os.getuid(),
        cma=_allows(allowed, _MEMORY_TRANSPORTS) and _kernel_allows_cma(root / "proc"),
        rdma=_allows(allowed, _RDMA_TRANSPORTS) and _has_rdma_port(root / "sys/class/infiniband"),
    )


def _allows(ucx_tls: str, transports: set[str]) -> bool:
    """UCX_TLS is a list of what may be used, or after a ^ of what may not."""
    named = set(ucx_tls.lstrip("^").split(","))
    if ucx_tls.startswith("^"):
        return not named & (transports - {"all"})
    return bool(named & transports)


def _kernel_allows_cma(proc: Path) -> bool:
    """Yama's scope: at 1 UCX opens its process to all readers, at 2 it needs a capability."""
    scope = _text(proc / "sys/kernel/yama/ptrace_scope") or "0"
    if scope == "2":
        capabilities = re.search(r"^CapEff:\s*(\w+)", _text(proc / "self/status"), re.MULTILINE)
        return capabilities is not None and bool(int(capabilities[1], 16) >> _CAP_SYS_PTRACE & 1)
    return scope in ("0", "1")


def _has_rdma_port(devices: Path) -> bool:
    return any("ACTIVE" in _text(state) for state in devices.glob("*/ports/*/state"))


def _text(path: Path) -> str:
    """Empty when there is no such file or it may not be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""

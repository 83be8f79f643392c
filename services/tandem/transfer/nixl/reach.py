"""Determines how the NIXL agents of two workers reach each other, if they do.

    mode of both (ucx_mode.py)          the two reach each other by
    MEMORY on the same host             MEMORY
    RDMA                                RDMA
    TCP on the same host, CMA allowed   MEMORY
    TCP, RDMA ports on both             RDMA
    TCP, else                           TCP
    anything else                       NOTHING: their blocks travel by gRPC

The same host is one machine, PID namespace, IPC namespace and user. UCX decides by itself and does
not say how; this module knows the facts that it decides by.
"""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path

import msgspec

from tandem.common.config.transfer import NixlTcp
from tandem.transfer.nixl.ucx_mode import UcxMode

_MEMORY_TRANSPORTS = {"all", "sm", "shm", "cma"}  # UCX's names
_TCP_TRANSPORTS = {"all", "tcp"}
_RDMA_TRANSPORTS = {"all", "ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "dc", "dc_x", "ud"}
_CAP_SYS_PTRACE = 19


class Reach(Enum):
    """A way to reach a peer; the value is the sentence for people."""

    MEMORY = "one machine, PID namespace, IPC namespace and user: each reads the other's memory"
    RDMA = "both have an active RDMA port"
    TCP = "plain TCP: anyone who reaches a worker's UCX port can write the engine's memory"
    NOTHING = (
        "no common path but plain TCP: the two do not share a machine, PID namespace, IPC"
        " namespace and user, and do not both have an RDMA port"
    )


class HostIdentity(msgspec.Struct, frozen=True):
    """Facts that a process tells its peers, so that they know how the two reach each other."""

    boot_id: str  # of the machine's kernel, new at each boot
    pid_namespace: str
    uid: int
    cma: bool  # the kernel and UCX_TLS allow that another process of the same user reads here
    rdma: bool  # an RDMA device with an active port, and UCX_TLS allows it
    ipc_namespace: str = ""  # empty: the process is of an older version
    tcp: bool = False  # --nixl-tcp insecure, and UCX_TLS allows TCP

    @property
    def mode(self) -> UcxMode | None:
        """The mode of the process's NIXL agents; None if NIXL reaches nobody from there."""
        if self.tcp:
            return UcxMode.TCP
        if self.rdma:
            return UcxMode.RDMA
        return UcxMode.MEMORY if self.cma else None


def reach(ours: HostIdentity, theirs: HostIdentity) -> Reach:
    """Returns how UCX moves bytes between the two, in either direction."""
    if ours.mode is None or ours.mode is not theirs.mode:
        return Reach.NOTHING
    if ours.mode is not UcxMode.RDMA and _share_memory(ours, theirs):
        return Reach.MEMORY
    if ours.rdma and theirs.rdma:
        return Reach.RDMA
    return Reach.TCP if ours.tcp else Reach.NOTHING


def _share_memory(ours: HostIdentity, theirs: HostIdentity) -> bool:
    here = (ours.boot_id, ours.pid_namespace, ours.uid)
    there = (theirs.boot_id, theirs.pid_namespace, theirs.uid)
    one_ipc = "" in (known := {ours.ipc_namespace, theirs.ipc_namespace}) or len(known) == 1
    return bool(ours.boot_id) and here == there and one_ipc and ours.cma and theirs.cma


def host_identity(
    nixl_tcp: NixlTcp = "off", root: Path = Path("/"), environment: Mapping[str, str] = os.environ
) -> HostIdentity:
    """The identity of this process and of those it starts. `root` holds proc and sys."""
    allowed = environment.get("UCX_TLS", "all")
    return HostIdentity(
        boot_id=_text(root / "proc/sys/kernel/random/boot_id"),
        pid_namespace=_link(root / "proc/self/ns/pid"),
        uid=os.getuid(),
        cma=_allows(allowed, _MEMORY_TRANSPORTS) and _kernel_allows_cma(root / "proc"),
        rdma=_allows(allowed, _RDMA_TRANSPORTS) and _has_rdma_port(root),
        ipc_namespace=_link(root / "proc/self/ns/ipc"),
        tcp=nixl_tcp == "insecure" and _allows(allowed, _TCP_TRANSPORTS),
    )


def _allows(ucx_tls: str, transports: set[str]) -> bool:
    """UCX_TLS is a list of what may be used, or after a ^ of what may not."""
    named = set(ucx_tls.lstrip("^").split(","))
    if ucx_tls.startswith("^"):
        return not named & (transports - {"all"})
    return bool(named & transports)


def _kernel_allows_cma(proc: Path) -> bool:
    """Yama's scope: at 1 UCX opens its process to all consumers, at 2 it needs a capability."""
    scope = _text(proc / "sys/kernel/yama/ptrace_scope") or "0"
    if scope == "2":
        capabilities = re.search(r"^CapEff:\s*(\w+)", _text(proc / "self/status"), re.MULTILINE)
        return capabilities is not None and bool(int(capabilities[1], 16) >> _CAP_SYS_PTRACE & 1)
    return scope in ("0", "1")


def _has_rdma_port(root: Path) -> bool:
    """Checks devices, too: a container sees the node's ports in /sys even without any of them."""
    if not any(root.glob("dev/infiniband/uverbs*")):
        return False
    ports = root.glob("sys/class/infiniband/*/ports/*/state")
    return any("ACTIVE" in _text(state) for state in ports)


def _text(path: Path) -> str:
    """Empty when there is no such file or it may not be read."""
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def _link(path: Path) -> str:
    with suppress(OSError):
        return os.readlink(path)
    return ""

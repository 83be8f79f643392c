"""Determines by which transport the NIXL agents of two workers reach each other.

Each agent has a mode (ucx_mode.py). The first row of this table that applies gives the transport:

    mode of both agents   condition                      transport
    MEMORY                same machine, other GPUs       HIDDEN_GPU: blocks are sent over gRPC
    MEMORY                same host                      MEMORY
    RDMA                  always                         RDMA
    TCP                   same host, CMA allowed         MEMORY
    TCP                   both have an RDMA port         RDMA
    TCP                   always                         TCP
    all other cases                                      NOTHING: blocks are sent over gRPC

CMA is the kernel's copy between the memory of two processes. Two workers are on the same host if
they share the machine, PID namespace, IPC namespace and user. UCX chooses the transport and does
not report the choice. So this module computes the choice from the same facts.

Between GPUs, the transport MEMORY is CUDA IPC, which needs the device of the peer's GPU in the
reader's container. "Other GPUs" means that the blocks are in VRAM and the two workers have no
device of a GPU in common, as in two pods with a GPU each. If they have some in common, reads are
tried.
"""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path

import msgspec

from tandem.common.config.transfer import NixlTcp
from tandem.transfer.nixl.ucx_mode import UcxMode

# Names in UCX_TLS that allow each kind of transport.
_MEMORY_TRANSPORTS = {"all", "sm", "shm", "cma"}
_TCP_TRANSPORTS = {"all", "tcp"}
_RDMA_TRANSPORTS = {"all", "ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "dc", "dc_x", "ud"}
_GPU_DEVICE = re.compile(r"nvidia\d+")
_CAP_SYS_PTRACE = 19


class Reach(Enum):
    """How two workers reach each other. The value is a text for operators."""

    MEMORY = "one machine, PID namespace, IPC namespace and user: each reads the other's memory"
    RDMA = "both have an active RDMA port"
    TCP = "plain TCP: anyone who reaches a worker's UCX port can write to the engine's memory"
    HIDDEN_GPU = (
        "no path to the peer's GPU: CUDA IPC needs the device of that GPU in this worker's "
        "container, and the two workers do not both have an RDMA port"
    )
    NOTHING = (
        "no common path but plain TCP: the two workers do not share a machine, PID namespace, "
        "IPC namespace and user, and do not both have an RDMA port"
    )


class HostIdentity(msgspec.Struct, frozen=True):
    """Facts about a process and its machine. Two workers exchange these facts, and `reach` computes
    from the facts how the workers reach each other."""

    boot_id: str  # id that Linux gives to the current boot of the machine
    pid_namespace: str
    uid: int
    # True: the kernel and UCX_TLS allow CMA, so other processes of the user can read this process's
    # memory.
    cma: bool
    rdma: bool  # True: an RDMA device has an active port, and UCX_TLS allows RDMA
    ipc_namespace: str = ""  # empty: the peer runs an older Tandem that does not send this field
    tcp: bool = False  # True: `--nixl-tcp insecure` is set, and UCX_TLS allows TCP
    # Names of the GPU devices in /dev, such as "nvidia0". Empty: no GPU, or an older Tandem.
    gpus: Sequence[str] = ()

    @property
    def mode(self) -> UcxMode | None:
        """The mode of the process's NIXL agents, or None if they could reach no peer."""
        if self.tcp:
            return UcxMode.TCP
        if self.rdma:
            return UcxMode.RDMA
        return UcxMode.MEMORY if self.cma else None


def reach(ours: HostIdentity, theirs: HostIdentity, memory: str = "DRAM") -> Reach:
    """Returns the transport that UCX uses between two processes, in both directions. The blocks are
    in `memory`, "DRAM" or "VRAM"."""
    if ours.mode is None or ours.mode is not theirs.mode:
        return Reach.NOTHING
    if ours.mode is UcxMode.MEMORY and memory == "VRAM" and _hides_gpu(ours, theirs):
        return Reach.HIDDEN_GPU
    if ours.mode is not UcxMode.RDMA and _share_memory(ours, theirs):
        return Reach.MEMORY
    if ours.rdma and theirs.rdma:
        return Reach.RDMA
    return Reach.TCP if ours.tcp else Reach.NOTHING


def _share_memory(ours: HostIdentity, theirs: HostIdentity) -> bool:
    own_host = (ours.boot_id, ours.pid_namespace, ours.uid)
    peer_host = (theirs.boot_id, theirs.pid_namespace, theirs.uid)
    one_ipc = "" in (known := {ours.ipc_namespace, theirs.ipc_namespace}) or len(known) == 1
    return bool(ours.boot_id) and own_host == peer_host and one_ipc and ours.cma and theirs.cma


def may_map_gpu(ours: HostIdentity, theirs: HostIdentity) -> bool:
    """Returns whether the two processes may be able to map the memory of each other's GPU over CUDA
    IPC. Only an attempt shows whether they are."""
    one_machine = bool(ours.boot_id) and ours.boot_id == theirs.boot_id
    return one_machine and not _hides_gpu(ours, theirs)


def _hides_gpu(ours: HostIdentity, theirs: HostIdentity) -> bool:
    """Returns whether the two surely see no GPU of each other, though they share the machine."""
    one_machine = bool(ours.boot_id) and ours.boot_id == theirs.boot_id
    is_known = bool(ours.gpus) and bool(theirs.gpus)
    return one_machine and is_known and set(ours.gpus).isdisjoint(theirs.gpus)


def host_identity(
    nixl_tcp: NixlTcp = "off", root: Path = Path("/"), environment: Mapping[str, str] = os.environ
) -> HostIdentity:
    """Returns the facts about this process, which are also true for its child processes.

    `root` contains the folders proc, sys and dev. Tests pass a folder other than "/".
    """
    allowed = environment.get("UCX_TLS", "all")
    return HostIdentity(
        boot_id=_text(root / "proc/sys/kernel/random/boot_id"),
        pid_namespace=_link(root / "proc/self/ns/pid"),
        uid=os.getuid(),
        cma=_allows(allowed, _MEMORY_TRANSPORTS) and _kernel_allows_cma(root / "proc"),
        rdma=_allows(allowed, _RDMA_TRANSPORTS) and _has_rdma_port(root),
        ipc_namespace=_link(root / "proc/self/ns/ipc"),
        tcp=nixl_tcp == "insecure" and _allows(allowed, _TCP_TRANSPORTS),
        gpus=gpu_devices(root),
    )


def gpu_devices(root: Path = Path("/")) -> tuple[str, ...]:
    """Returns the names of the GPU devices in /dev, such as "nvidia0". The number is the driver's,
    so it means the same GPU in every container of a machine."""
    found = (path.name for path in root.glob("dev/nvidia*"))
    return tuple(sorted(name for name in found if _GPU_DEVICE.fullmatch(name)))


def _allows(ucx_tls: str, transports: set[str]) -> bool:
    """Returns whether the value `ucx_tls` of UCX_TLS allows any of `transports`.

    The value lists the allowed transports, or, if it begins with "^", the excluded ones.
    """
    named = set(ucx_tls.lstrip("^").split(","))
    if ucx_tls.startswith("^"):
        return not named & (transports - {"all"})
    return bool(named & transports)


def _kernel_allows_cma(proc: Path) -> bool:
    """Returns whether Yama, a Linux security module, lets processes read each other's memory.

    The setting `ptrace_scope` of Yama has these values:
    - 0: reading is allowed.
    - 1: the process that is read must give permission, and UCX does so.
    - 2: the reading process needs the capability CAP_SYS_PTRACE.
    - 3: reading is forbidden.
    """
    scope = _text(proc / "sys/kernel/yama/ptrace_scope") or "0"
    if scope == "2":
        capabilities = re.search(r"^CapEff:\s*(\w+)", _text(proc / "self/status"), re.MULTILINE)
        return capabilities is not None and bool(int(capabilities[1], 16) >> _CAP_SYS_PTRACE & 1)
    return scope in ("0", "1")


def _has_rdma_port(root: Path) -> bool:
    """Returns whether this process has an RDMA device and the machine has an active RDMA port.

    An active port in /sys is not enough, because a container without an RDMA device also sees the
    machine's ports there.
    """
    if not any(root.glob("dev/infiniband/uverbs*")):
        return False
    ports = root.glob("sys/class/infiniband/*/ports/*/state")
    return any("ACTIVE" in _text(state) for state in ports)


def _text(path: Path) -> str:
    """Returns the stripped text of a file, or "" if the file cannot be read."""
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def _link(path: Path) -> str:
    with suppress(OSError):
        return os.readlink(path)
    return ""

"""Checks the kernel, memory, resource limits and disks."""

import os
import resource
import shutil
from pathlib import Path

from tandem.cluster.logs.run_logs import runs_folder
from tandem.engine.memory import read_memory
from tandem.models.gguf.convert import cache_root
from tandem.ops.doctor.host import Finding, HostFiles
from tandem.router.workers.troubles import is_disk_full
from tandem.transfer.nixl.reach import host_identity

# default of --connections-max, which limits HTTP connections and gRPC connections separately
_CONNECTIONS = 4096
_OTHER_FILES = 256
_SHARED_MIN = 64 << 20
_KERNEL_MIN = (5, 6)  # oldest Linux with both pidfd_open and pidfd_getfd
_CAP_IPC_LOCK = 14


def kernel(host: HostFiles) -> Finding:
    """Checks the version of Linux."""
    release = host.text("proc/sys/kernel/osrelease")
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdecimal())
    if not numbers or numbers >= _KERNEL_MIN:
        return Finding("kernel", release)
    remedy = f"use Linux {_KERNEL_MIN[0]}.{_KERNEL_MIN[1]} or newer"
    return Finding("kernel", release, "`tandem up` cannot watch its processes", remedy)


def memory(host: HostFiles) -> Finding:
    """Checks that at least 5% of the memory is free."""
    now = read_memory()
    found = f"{now.free_bytes / 1e9:.1f} of {now.total_bytes / 1e9:.1f} GB free"
    if now.free_bytes >= now.total_bytes // 20:
        return Finding("memory", found)
    remedy = "end other programs, or give workers less (--kv-memory)"
    return Finding("memory", found, "Linux may end the largest process", remedy)


def huge_pages(host: HostFiles) -> Finding:
    """Checks that transparent huge pages are enabled."""
    chosen = _chosen(host, "enabled")
    if chosen not in ("never", "unknown"):
        return Finding("huge pages", chosen)
    cost = "weights use small memory pages, so CPU workers compute more slowly"
    remedy = "write madvise to /sys/kernel/mm/transparent_hugepage/enabled"
    return Finding("huge pages", chosen, cost, remedy)


def shared_huge_pages(host: HostFiles) -> Finding:
    """Checks that memory that processes share, such as the KV pool of a CPU worker, may have
    transparent huge pages."""
    chosen = _chosen(host, "shmem_enabled")
    if chosen not in ("never", "deny", "unknown"):
        return Finding("shared huge pages", chosen)
    cost = "KV pools use small memory pages, so CPU workers decode more slowly at long contexts"
    remedy = "write advise to /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    return Finding("shared huge pages", chosen, cost, remedy)


def _chosen(host: HostFiles, setting: str) -> str:
    """Returns the value of a setting of transparent huge pages."""
    values = host.text(f"sys/kernel/mm/transparent_hugepage/{setting}")
    return values.partition("[")[2].partition("]")[0] or "unknown"


def shared_memory(host: HostFiles) -> Finding:
    """Checks the free space in /dev/shm, which Ray needs."""
    place = host.root / "dev/shm"
    free = shutil.disk_usage(place).free if place.is_dir() else 0
    found = f"{free / 1e6:.0f} MB free"
    if free >= _SHARED_MIN:
        return Finding("/dev/shm", found)
    remedy = "use `docker run --shm-size`, or set `worker.sharedMemory` in the chart"
    return Finding("/dev/shm", found, "Ray's head may not start", remedy)


def open_files(host: HostFiles) -> Finding:
    """Checks the hard limit on open files. The soft limit does not matter, because a router raises
    it up to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return Finding("open files", "unlimited")
    needed = 2 * _CONNECTIONS + _OTHER_FILES
    room = max(1, (hard - _OTHER_FILES) // 2)
    if hard >= needed:
        return Finding("open files", str(hard))
    cost = f"a router accepts {room} connections instead of {_CONNECTIONS}"
    remedy = f"run `ulimit -Hn {needed}`, or set LimitNOFILE={needed} in a unit of systemd"
    return Finding("open files", str(hard), cost, remedy)


def memlock(host: HostFiles) -> Finding:
    """Checks the limit on locked memory. Only RDMA needs it: the kernel locks the memory that a
    device reads."""
    # The soft limit is checked, because Tandem does not raise it.
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Finding("memlock", "unlimited")
    if host.has_capability(_CAP_IPC_LOCK):
        return Finding("memlock", "unlimited, because the process has the capability IPC_LOCK")
    found = f"{limit / 1e6:.1f} MB"
    has_rdma = host_identity(root=host.root, environment=host.environment).rdma
    if not has_rdma or limit >= read_memory().total_bytes:
        return Finding("memlock", found)
    cost = "NIXL cannot register a larger KV pool for RDMA, so its blocks are sent over gRPC"
    remedy = (
        "run `ulimit -l unlimited`, set LimitMEMLOCK=infinity in a unit of systemd (the container "
        "runtime's, too), or set `worker.rdma.runAsRoot` in the chart"
    )
    return Finding("memlock", found, cost, remedy)


def model_disk(host: HostFiles) -> Finding:
    """Checks the free space for downloaded and converted models."""
    from huggingface_hub.constants import HF_HUB_CACHE

    cost = "a model cannot be downloaded or converted, so workers cannot start"
    remedy = "free some space, or name a folder on another disk in TANDEM_CACHE_DIR and HF_HOME"
    return _disk("model disk", (cache_root(), Path(HF_HUB_CACHE)), cost, remedy)


def run_disk(host: HostFiles) -> Finding:
    """Checks the free space for a run's temporary files and logs."""
    cost = "logs are incomplete, and routers report a problem with the workers of this host"
    remedy = "free some space, or name a folder on another disk in TMPDIR and XDG_STATE_HOME"
    # tempfile.gettempdir() is not used, because it writes a file, and fails if all disks are full.
    temporary = Path(host.environment.get("TMPDIR", "/tmp"))
    return _disk("run disk", (temporary, runs_folder()), cost, remedy)


def _disk(name: str, folders: tuple[Path, ...], cost: str, remedy: str) -> Finding:
    """Checks the free space of the disks with these folders. The result names only the fullest
    disk. The folders need not exist."""
    usages = {folder: shutil.disk_usage(_present(folder)) for folder in folders}
    folder, usage = min(usages.items(), key=lambda pair: pair[1].free / max(1, pair[1].total))
    found = f"{usage.free / 1e9:.3g} of {usage.total / 1e9:.3g} GB free in {folder}"
    full = is_disk_full(usage.free, usage.total)
    return Finding(name, found, cost, remedy) if full else Finding(name, found)


def _present(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))

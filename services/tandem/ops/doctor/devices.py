"""Checks GPUs and the transports for KV blocks: NIXL, shared memory and RDMA."""

import re
from importlib.util import find_spec
from pathlib import Path

from tandem.cluster.gpu_check import read_driver
from tandem.cluster.gpu_check import why_unusable as why_gpus_unusable
from tandem.common import cuda_build
from tandem.ops.doctor.host import Finding, HostFiles
from tandem.transfer.nixl import cuda_version
from tandem.transfer.nixl.reach import gpu_devices, host_identity
from tandem_kernels.native.library import load, why_unusable

_NIXL_MIN = (1, 5)  # oldest NIXL version that `pip install tandem-llm[nixl]` accepts
_UCX_PACKAGES = ("libucx-cu13", "libucx-cu12", "libucx")
_PCI_DISPLAY = "0x03"  # class of graphics cards and of other GPUs


def gpus(host: HostFiles) -> Finding:
    """Checks the GPUs visible to this process, their driver, and whether PyTorch can use them."""
    number = len(list((host.root / "dev").glob("nvidia[0-9]*")))
    driver = read_driver(host.root)
    if not number and driver:
        cost = "this container has no GPU, so workers compute on the CPU"
        remedy = "use `docker run --gpus all`, or set `worker.gpu.count` in the chart"
        return Finding("GPU", f"none, driver {driver}", cost, remedy)
    if not number:
        cost = "workers compute on the CPU"
        return Finding("GPU", "none", cost, "use a host with a GPU if CPUs are too slow")
    models = sorted({name for name in map(_model, _cards(host)) if name})
    found = f"{number} x {' and '.join(models) or 'NVIDIA'}, driver {driver or 'unknown'}"
    if unusable := why_gpus_unusable(driver):
        return Finding("GPU", found, f"{unusable.why}: no GPU is used", unusable.remedy)
    return Finding("GPU", found)


def kernels(host: HostFiles) -> Finding:
    """Checks that the compiled CPU kernels can be used. Reports this processor's best instruction
    set."""
    name = "CPU kernels"
    if reason := why_unusable():
        cost = "workers on CPUs do not start; with --kernels torch they compute many times slower"
        remedy = "run `make` in the repository, or install the package again on this machine"
        return Finding(name, reason, cost, remedy)
    library = load()
    assert library is not None
    return Finding(name, f"compiled, with {library.best_instructions}")


def _cards(host: HostFiles) -> list[str]:
    folder = host.root / "proc/driver/nvidia/gpus"
    return [host.text(str(path.relative_to(host.root))) for path in folder.glob("*/information")]


def _model(card: str) -> str:
    match = re.search(r"^Model:\s*(.+)$", card, re.MULTILINE)
    return match[1].strip() if match else ""


def nixl(host: HostFiles) -> Finding:
    """Checks that NIXL is installed in a supported version, and on a host with a GPU that it is
    built for PyTorch's version of CUDA."""
    packages = (name.partition(".")[0] for name in cuda_version.nixl_modules())
    package = next((name for name in packages if find_spec(name) is not None), None)
    if package is None:
        remedy = "pip install 'tandem-llm[nixl]'"
        cost = "KV blocks are sent over gRPC, which is slower"
        return Finding("NIXL", "not installed", cost, remedy)
    version = cuda_build.installed_version(package)
    ucx = next(
        (f"UCX {v}" for name in _UCX_PACKAGES if (v := cuda_build.installed_version(name))),
        "its UCX",
    )
    found = f"{package} {version or 'unknown'} with {ucx}, UCX_TLS="
    found += host.environment.get("UCX_TLS", "all")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers and numbers < _NIXL_MIN:
        least = ".".join(map(str, _NIXL_MIN))
        cost = f"Tandem needs NIXL {least} or newer; KV blocks may be sent over gRPC instead"
        return Finding("NIXL", found, cost, f"pip install '{package}>={least}'")
    if gpu_devices(host.root) and (why := cuda_version.why_cuda_differs(package)):
        cost = f"{why}: if NIXL cannot read the GPU's memory, KV blocks are sent over gRPC"
        remedy = f"pip install nixl-cu{cuda_build.cuda_of_torch()}"
        return Finding("NIXL", found, cost, remedy)
    return Finding("NIXL", found)


def cuda_ipc(host: HostFiles) -> Finding:
    """Checks that this process sees every GPU of the machine that NVIDIA's driver uses. CUDA IPC
    reads only GPUs whose devices are in the reader's container."""
    name = "CUDA IPC"
    visible = len(gpu_devices(host.root))
    number = sum(map(_is_nvidia_gpu, (host.root / "sys/bus/pci/devices").glob("*")))
    if not visible:
        return Finding(name, "no GPU")
    if number <= visible:
        return Finding(name, "all GPUs of this machine are visible")
    cost = (
        "workers in other containers have GPUs that are not visible here; blocks of these GPUs "
        "come over RDMA, or else over gRPC"
    )
    remedy = (
        "use RDMA, or run all workers of this machine that exchange blocks in one container with "
        "their GPUs"
    )
    return Finding(name, f"{visible} of {number} GPUs of this machine are visible", cost, remedy)


def _is_nvidia_gpu(device: Path) -> bool:
    """Returns whether NVIDIA's driver uses this PCI device as a GPU. /sys also shows a container
    the devices that it may not use."""
    try:
        is_gpu = (device / "class").read_text().startswith(_PCI_DISPLAY)
        return is_gpu and (device / "driver").readlink().name == "nvidia"
    except OSError:  # no driver uses the device
        return False


def memory_reads(host: HostFiles) -> Finding:
    """Checks that a worker on this host may read the memory of another worker (cross-memory attach,
    CMA)."""
    identity = host_identity(root=host.root, environment=host.environment)
    scope = host.text("proc/sys/kernel/yama/ptrace_scope") or "none"
    if identity.cma:
        return Finding("CMA", f"ptrace scope {scope}")
    cost = "workers on this host send KV blocks over gRPC: CMA, reading each other's memory, is off"
    remedy = "run `sysctl kernel.yama.ptrace_scope=1`, and let UCX_TLS allow shared memory"
    return Finding("CMA", f"ptrace scope {scope}", cost, remedy)


def rdma(host: HostFiles) -> Finding:
    """Checks that this host has an active RDMA port."""
    if host_identity(root=host.root, environment=host.environment).rdma:
        return Finding("RDMA", "a port is active")
    cost = "KV blocks are sent over gRPC between hosts"
    remedy = "set `worker.rdma.count` in the chart; without RDMA, use --nixl-tcp insecure"
    return Finding("RDMA", "no active port", cost, remedy)

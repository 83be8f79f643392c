"""The UCX transports that a NIXL agent may use, and UCX's settings for a GPU's memory.

Each agent has one mode:

    mode     transports                                   reachable peers
    MEMORY   shared memory, copied by the kernel (CMA)    workers on this machine
    RDMA     the RDMA network card                        workers with an RDMA port
    TCP      all transports of UCX, including TCP         all workers

The mode TCP is used only with the option `--nixl-tcp insecure`. UCX's TCP transport listens on
every network address of the machine, and checks no token. Any program that connects can write to
any address in the process (PUT). So the modes MEMORY and RDMA exclude TCP, and an agent in these
modes opens no TCP port. A test with NIXL 1.5.1 and UCX 1.23 confirmed this for MEMORY. The mode
RDMA was not tested.

If no transport can read a peer's memory directly, UCX emulates the read in software, without a
word in the log. From GPU to GPU, it then copies pieces of 8 KiB through the host's memory. The
variables in `_GPU_SETTINGS` let UCX read over CUDA IPC, and turn emulated reads into errors, so
that the pair uses gRPC and the log says why.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum

_CUDA = ("cuda_copy", "cuda_ipc")
_GPU_SETTINGS = {
    # By default, UCX reads over CUDA IPC only if NVML reports an active NVLink. Other transports
    # of the mode MEMORY cannot read a GPU's memory.
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
    # A read that UCX would emulate fails instead.
    "UCX_PROTO_EMULATION_ENABLE": "n",
}
# UCX's names of the transports for the mode MEMORY. UCX connects two agents with messages over
# `posix` or `sysv`, and copies blocks with `cma`. Without `cma`, a read from a process that died
# would never end.
_MEMORY = ("posix", "sysv", "cma", "self")


class UcxMode(Enum):
    MEMORY = "memory"
    RDMA = "rdma"
    TCP = "tcp"


def backend_options(mode: UcxMode) -> dict[str, str]:
    """Returns the options of NIXL's UCX backend.

    In the mode MEMORY, UCX's error handling is off. With error handling on, UCX would refuse to
    connect over shared memory. A CMA read from a dead process fails nevertheless, because the
    kernel reports that the process is gone.
    """
    return {"ucx_error_handling_mode": "none"} if mode is UcxMode.MEMORY else {}


def transports(
    mode: UcxMode,
    memory: str,
    environment: Mapping[str, str] = os.environ,
    *,
    with_cuda_ipc: bool = True,
) -> str:
    """Returns the value of the variable UCX_TLS for an agent whose blocks are in `memory`, "DRAM"
    or "VRAM". Without `with_cuda_ipc`, CUDA IPC is not one of the transports.

    In the modes RDMA and TCP, the result has the transports that the operator has set in UCX_TLS,
    except those that the mode does not allow.
    """
    allowed = environment.get("UCX_TLS", "all")
    if mode is UcxMode.TCP:
        return allowed if with_cuda_ipc else _without_cuda_ipc(allowed)
    device = _CUDA if memory == "VRAM" else ()
    if mode is UcxMode.MEMORY:
        names = [*_MEMORY, *device]
    else:
        named = [] if allowed.startswith("^") else allowed.split(",")
        names = [name for name in named if name not in ("", "all", "tcp")] or ["ib", *device]
    return ",".join(name for name in names if with_cuda_ipc or name != "cuda_ipc")


def _without_cuda_ipc(allowed: str) -> str:
    """Returns a value of UCX_TLS that allows the same transports but CUDA IPC."""
    if allowed == "all":
        return "^cuda_ipc"
    names = allowed.lstrip("^").split(",")
    if allowed.startswith("^"):
        return allowed if "cuda_ipc" in names else f"{allowed},cuda_ipc"
    return ",".join(name for name in names if name != "cuda_ipc")


def ucx_settings(
    mode: UcxMode,
    memory: str,
    environment: Mapping[str, str] = os.environ,
    *,
    with_cuda_ipc: bool = True,
) -> dict[str, str]:
    """Returns the variables of UCX for an agent whose blocks are in `memory`, "DRAM" or "VRAM".
    Without `with_cuda_ipc`, UCX does not use CUDA IPC.

    Apart from UCX_TLS, variables that the operator has set are not in the result. In the mode TCP,
    emulated reads stay allowed, because UCX emulates every read over TCP.
    """
    settings = {"UCX_TLS": transports(mode, memory, environment, with_cuda_ipc=with_cuda_ipc)}
    if memory == "VRAM" and mode is not UcxMode.TCP:
        wanted = _GPU_SETTINGS.items()
        settings |= {name: value for name, value in wanted if name not in environment}
    return settings


@contextmanager
def ucx_environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of UCX during the `with` block, in which the caller creates an agent. UCX
    reads the variables only when an agent is created."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

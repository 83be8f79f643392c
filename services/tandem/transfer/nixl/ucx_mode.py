"""The UCX transports that an agent may use. One mode belongs to one agent.

    MEMORY   shared memory, copied by the kernel (CMA): peers on this machine
    RDMA     the network card: any peer with an RDMA port, on this machine, too
    TCP      all that UCX has, TCP included: only with --nixl-tcp insecure

UCX's TCP transport listens on every network address of the machine and executes a PUT to any
address in the process, with no token and no NIXL metadata. So no other mode has it: an agent in
MEMORY or RDMA mode opens no TCP port (seen with NIXL 1.5.1 and UCX 1.23, MEMORY only).
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum

_CUDA = ("cuda_copy", "cuda_ipc")
# `posix` and `sysv` carry the few messages that join two agents; `cma` carries every block. Without
# it a read from a process that died never ends.
_MEMORY = ("posix", "sysv", "cma", "self")


class UcxMode(Enum):
    MEMORY = "memory"
    RDMA = "rdma"
    TCP = "tcp"


def backend_options(mode: UcxMode) -> dict[str, str]:
    """The options of NIXL's UCX backend.

    UCX's shared memory has no handler for a peer's failure, and refuses to join without this. A
    read by CMA from a process that died fails all the same: the kernel says so.
    """
    return {"ucx_error_handling_mode": "none"} if mode is UcxMode.MEMORY else {}


def transports(mode: UcxMode, memory: str, environment: Mapping[str, str] = os.environ) -> str:
    """UCX_TLS for an agent whose blocks lie in `memory`, "DRAM" or "VRAM".

    What the operator's own UCX_TLS names is kept where the mode has it.
    """
    allowed = environment.get("UCX_TLS", "all")
    if mode is UcxMode.TCP:
        return allowed
    device = _CUDA if memory == "VRAM" else ()
    if mode is UcxMode.MEMORY:
        return ",".join((*_MEMORY, *device))
    named = [] if allowed.startswith("^") else allowed.split(",")
    kept = [name for name in named if name not in ("", "all", "tcp")]
    return ",".join(kept or ("ib", *device))


@contextmanager
def ucx_tls(value: str) -> Iterator[None]:
    """Sets UCX_TLS while an agent is made: UCX reads it then, and takes it from nowhere else."""
    before = os.environ.get("UCX_TLS")
    os.environ["UCX_TLS"] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ["UCX_TLS"]
        else:
            os.environ["UCX_TLS"] = before

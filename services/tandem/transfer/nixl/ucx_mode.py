"""The UCX transports that an agent may use. Each agent has one mode.

    MEMORY   shared memory, copied by the kernel (CMA): peers on this machine
    RDMA     the network card: any peer with an RDMA port, also on this machine
    TCP      all of UCX's transports, TCP included: only with --nixl-tcp insecure
UCX's TCP transport listens on every network address of the machine. It executes a PUT to any
address in the process, without a token or NIXL metadata, so the other modes exclude it. An agent in
MEMORY or RDMA mode opens no TCP port (verified with NIXL 1.5.1 and UCX 1.23, MEMORY only).
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum

_CUDA = ("cuda_copy", "cuda_ipc")
# `posix` and `sysv` carry the few messages that connect two agents; `cma` carries every block.
# Without `cma`, a read from a process that died never ends.
_MEMORY = ("posix", "sysv", "cma", "self")


class UcxMode(Enum):
    MEMORY = "memory"
    RDMA = "rdma"
    TCP = "tcp"


def backend_options(mode: UcxMode) -> dict[str, str]:
    """Returns the options of NIXL's UCX backend.

    UCX's shared memory does not support error handling and refuses to connect while it is enabled.
    A CMA read from a dead process still fails, because the kernel reports it.
    """
    return {"ucx_error_handling_mode": "none"} if mode is UcxMode.MEMORY else {}


def transports(mode: UcxMode, memory: str, environment: Mapping[str, str] = os.environ) -> str:
    """Returns UCX_TLS for an agent whose blocks are in `memory`, "DRAM" or "VRAM".

    Transports in the operator's own UCX_TLS are kept if the mode allows them.
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
    """Sets UCX_TLS while an agent is created, because UCX reads it only then."""
    before = os.environ.get("UCX_TLS")
    os.environ["UCX_TLS"] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ["UCX_TLS"]
        else:
            os.environ["UCX_TLS"] = before

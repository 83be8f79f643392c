"""Chooses the transport of a pair of workers and writes the warning text about it. Does no I/O.

setting                  chosen transport
cuda_ipc, nixl or grpc   the one that is set
auto                     the first of CUDA IPC, NIXL and gRPC that works and is not clearly slower
                         than the fastest one (`SLOWER`). If an earlier one could be used on better
                         terms, a warning names the remedy.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tandem.common.config.transfer import Transport
from tandem.common.perf_model.rates import PairRate
from tandem.transfer.nixl.reach import Reach

# Two transports are compared by the predicted times of a pull of this many bytes.
PULL_BYTES = 4 << 20
# A transport is clearly slower than another one if its pull takes more than this multiple of the
# time of the other transport's pull. For example, 13 ms is clearly slower than 10 ms, 12 ms is not.
SLOWER = 1.25
# Name of each transport in logs. With `auto`, earlier ones are preferred.
NAMES = {"cuda_ipc": "CUDA IPC", "nixl": "NIXL", "grpc": "gRPC"}
_LIFT_NOTHING = (
    "Let the two workers share a machine, its namespaces and a user (in Kubernetes hostPID and"
    " hostIPC), or give both an RDMA port"
)
_LIFT_HIDDEN_GPU = (
    "Give both workers an RDMA port, or run them in one container that has the GPUs of both"
)
_LIFT_SLOW = {
    "nixl": (
        "NIXL is measured again from time to time; check UCX_TLS and other load on the machine"
    ),
    "cuda_ipc": (
        "CUDA IPC is measured again from time to time; check the path between the GPUs"
        " (nvidia-smi topo -m) and other load on them"
    ),
}


@dataclass(frozen=True, slots=True)
class Way:
    """The measurement of one transport between two workers.

    `rate` is None if the transport was not measured. `error` is not empty if the transport does not
    work.
    """

    rate: PairRate | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class TransportChoice:
    transport: str
    reason: str = ""  # one word such as "slow" if a better transport cannot be used; otherwise ""
    warning: str = ""  # `reason` as a text with the measured rates and a remedy


def choose_transport(
    wanted: Transport, ways: Mapping[str, Way], reach: Reach | None
) -> TransportChoice:
    """Returns the transport of a pair.

    `ways` has the transports that the two workers have in common, at least gRPC: it always works
    here, because they have already called `Connect` over gRPC. `reach` says how NIXL reaches the
    peer. It is None if the peer did not describe its host.
    """
    ordered = [name for name in NAMES if name in ways]
    chosen = wanted if wanted != "auto" else _first_good(ordered, ways)
    figures_of_chosen = f"{NAMES[chosen]}: {figures(ways.get(chosen, Way()))}"
    if chosen == "nixl" and reach is Reach.TCP:
        return TransportChoice("nixl", "tcp", f"NIXL uses {reach.value}")
    if wanted != "auto":
        return TransportChoice(chosen)
    for name in ordered[: ordered.index(chosen)]:
        way = ways[name]
        if not way.error:
            why = f"{NAMES[name]} is slower: {figures(way)}. {figures_of_chosen}"
            return TransportChoice(chosen, "slow", f"{why}. {_LIFT_SLOW[name]}")
        why = f"{NAMES[name]} does not work: {way.error}. {figures_of_chosen}"
        return TransportChoice(chosen, "broken", why)
    if chosen == "grpc" and reach is Reach.NOTHING:
        why = f"NIXL has {reach.value}. {figures_of_chosen}. {_LIFT_NOTHING}"
        return TransportChoice("grpc", "unreachable", why)
    if chosen == "grpc" and reach is Reach.HIDDEN_GPU:
        why = f"NIXL has {reach.value}. {figures_of_chosen}. {_LIFT_HIDDEN_GPU}"
        return TransportChoice("grpc", "gpu", why)
    return TransportChoice(chosen)


def _first_good(ordered: list[str], ways: Mapping[str, Way]) -> str:
    """Returns the first transport that works and is not clearly slower than another one."""
    working = [name for name in ordered if not ways[name].error]
    for name in working:
        if not any(is_slower(ways[name].rate, ways[other].rate) for other in working):
            return name
    return "grpc"


def is_slower(one: PairRate | None, other: PairRate | None) -> bool:
    """Returns whether pulls at rate `one` are clearly slower than at rate `other`."""
    if one is None or other is None:
        return False
    return one.seconds(PULL_BYTES) > SLOWER * other.seconds(PULL_BYTES)


def figures(way: Way) -> str:
    if way.rate is None:
        return "not measured"
    latency_ms = way.rate.latency_s * 1000
    return f"{way.rate.bytes_per_s / 1e9:.2f} GB/s with a latency of {latency_ms:.2f} ms"

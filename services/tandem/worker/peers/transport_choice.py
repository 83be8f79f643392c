"""Chooses the transport of a pair of workers and writes the warning text about it. Does no I/O.

setting        chosen transport
nixl or grpc   the one that is set
auto           NIXL if NIXL reads work and are not clearly slower than gRPC (`SLOWER`);
               otherwise gRPC, with a warning that names the remedy
"""

from dataclasses import dataclass

from tandem.common.config.transfer import Transport
from tandem.common.perf_model.rates import PairRate
from tandem.transfer.nixl.reach import Reach

# Two transports are compared by the predicted times of a pull of this many bytes.
PULL_BYTES = 4 << 20
# A transport is clearly slower than another one if its pull takes more than this multiple of the
# time of the other transport's pull. For example, 13 ms is clearly slower than 10 ms, 12 ms is not.
SLOWER = 1.25
_LIFT_NOTHING = (
    "Let the two workers share a machine, its namespaces and a user (in Kubernetes hostPID and"
    " hostIPC), or give both an RDMA port"
)
_LIFT_HIDDEN_GPU = (
    "Give both workers an RDMA port, or run them in one container that has the GPUs of both"
)
_LIFT_SLOW = "NIXL is measured again from time to time; check UCX_TLS and other load on the machine"


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
    wanted: Transport, nixl: Way, grpc: Way, reach: Reach | None
) -> TransportChoice:
    """Returns the transport of a pair. `reach` is None if the peer did not describe its host.

    gRPC always works here, because the two workers have already called `Connect` over gRPC.
    """
    if wanted == "grpc":
        return TransportChoice("grpc")
    if reach is Reach.NOTHING:
        why = f"NIXL has {reach.value}. gRPC: {figures(grpc)}. {_LIFT_NOTHING}"
        return TransportChoice("grpc", "unreachable", why)
    if reach is Reach.HIDDEN_GPU:
        why = f"NIXL has {reach.value}. gRPC: {figures(grpc)}. {_LIFT_HIDDEN_GPU}"
        return TransportChoice("grpc", "gpu", why)
    if wanted != "nixl" and nixl.error:
        why = f"NIXL does not work: {nixl.error}. gRPC: {figures(grpc)}"
        return TransportChoice("grpc", "broken", why)
    if wanted != "nixl" and is_slower(nixl.rate, grpc.rate):
        why = f"NIXL is slower: {figures(nixl)}. gRPC: {figures(grpc)}. {_LIFT_SLOW}"
        return TransportChoice("grpc", "slow", why)
    if reach is Reach.TCP:
        return TransportChoice("nixl", "tcp", f"NIXL uses {reach.value}")
    return TransportChoice("nixl")


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

"""Chooses the transport that a pair uses, and words the warning about it. Pure.

wanted nixl or grpc   that one
auto                  NIXL, if its reads work and are not slower than gRPC; else gRPC, with a
                      warning that says what would lift it
"""

from dataclasses import dataclass

from tandem.common.config.transfer import Transport
from tandem.common.perf_model.rates import PairRate
from tandem.transfer.nixl.reach import Reach

PULL_BYTES = 4 << 20  # the pull that transports are compared by
SLOWER = 1.25  # how much slower a measurement must be to mean it
_LIFT_NOTHING = (
    "Let the two share a machine, its namespaces and a user (in Kubernetes hostPID and hostIPC), or"
    " give both an RDMA port"
)
_LIFT_SLOW = (
    "NIXL is measured again now and then; look at UCX_TLS and at what else the machine does"
)


@dataclass(frozen=True, slots=True)
class Way:
    """One transport of a pair: `error` says why it does not work, `rate` is None if unmeasured."""

    rate: PairRate | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class TransportChoice:
    transport: str
    reason: str = ""  # a word for why it is not the best one
    warning: str = ""  # and a sentence, with figures and what would lift it


def choose_transport(
    wanted: Transport, nixl: Way, grpc: Way, reach: Reach | None
) -> TransportChoice:
    """`reach` is None when the peer did not tell where it runs. gRPC is always to be had."""
    if wanted == "grpc":
        return TransportChoice("grpc")
    if reach is Reach.NOTHING:
        why = f"NIXL has {reach.value}. gRPC: {figures(grpc)}. {_LIFT_NOTHING}"
        return TransportChoice("grpc", "unreachable", why)
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
    """Returns whether pulls of the first were measured to be clearly slower than the second's."""
    if one is None or other is None:
        return False
    return one.seconds(PULL_BYTES) > SLOWER * other.seconds(PULL_BYTES)


def figures(way: Way) -> str:
    if way.rate is None:
        return "not measured"
    return f"{way.rate.bytes_per_s / 1e9:.2f} GB/s after {way.rate.latency_s * 1000:.2f} ms"

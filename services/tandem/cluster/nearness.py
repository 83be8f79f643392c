"""Finds hosts with a slow network path to the workers that a new worker would exchange KV with.
These workers are its peers: a decode worker's peers are the prefill workers, and vice versa.

Workers measure the bandwidth when they pull blocks from each other. The bandwidth between two hosts
is the median of what their workers measured, and a host also has a bandwidth to itself. The
bandwidth of a host to several peers is the harmonic mean of its bandwidths to the peers' hosts.

A host is far if another suitable host has more than `FAR_TIMES` its bandwidth to the peers.
Example: if A has 9 MB/s and B has 800 MB/s, A is far; with 500 MB/s instead of 9, A would not be
far. Such smaller differences are ignored, because balancing the load matters more. This module does
no I/O.
"""

from collections.abc import Collection, Mapping, Sequence
from statistics import harmonic_mean, median

FAR_TIMES = 2.0
_NAMED_MAX = 3  # `far_reason` names at most this many far hosts

PairBandwidths = Mapping[str, Mapping[str, float]]  # worker id -> peer's worker id -> bytes/s
HostBandwidths = Mapping[tuple[str, str], float]  # two host ids in alphabetical order -> bytes/s


def host_bandwidths(pairs: PairBandwidths, host_of: Mapping[str, str]) -> HostBandwidths:
    """Computes the bandwidth between each two hosts, in bytes/s: the median of all values that
    workers of the two hosts measured.

    `host_of` maps worker ids to host ids. Workers without an entry in `host_of` are ignored.
    """
    found: dict[tuple[str, str], list[float]] = {}
    for worker_id, peers in pairs.items():
        for peer, bytes_per_s in peers.items():
            if worker_id in host_of and peer in host_of:
                key = _in_order(host_of[worker_id], host_of[peer])
                found.setdefault(key, []).append(bytes_per_s)
    return {key: median(measured) for key, measured in found.items()}


def bandwidths_to(
    peer_hosts: Sequence[str], host_ids: Collection[str], between: HostBandwidths
) -> dict[str, float]:
    """Computes the bandwidth of each host to all peers together, in bytes/s (harmonic mean).

    For example, a host with 100 MB/s to one peer and 300 MB/s to another one has 150 MB/s, which is
    the rate at which it pulls the same number of bytes from both, one after the other.

    `peer_hosts` has the host of each peer. The result lacks hosts whose bandwidth to some peer is
    unknown, because means over different peers cannot be compared.
    """
    found = {}
    for host_id in host_ids:
        each = [between.get(_in_order(host_id, peer_host)) for peer_host in peer_hosts]
        known = [bytes_per_s for bytes_per_s in each if bytes_per_s is not None]
        if known and len(known) == len(each):
            found[host_id] = harmonic_mean(known)
    return found


def far_hosts(bandwidths: Mapping[str, float]) -> list[str]:
    """Selects the hosts that are far, slowest first. The fastest host is never far."""
    fastest = max(bandwidths.values(), default=0.0)
    far = [host_id for host_id, found in bandwidths.items() if found * FAR_TIMES < fastest]
    return sorted(far, key=lambda host_id: (bandwidths[host_id], host_id))


def far_reason(far: Sequence[str], bandwidths: Mapping[str, float], peers: str) -> str:
    """Explains why hosts were not chosen, such as "host-b has 9.2 MB/s to the decode workers;
    the fastest host has 812.0 MB/s". `peers` is the pool of the peers."""
    named = [f"{host_id} has {_shown(bandwidths[host_id])}" for host_id in far[:_NAMED_MAX]]
    more = f" ({len(far) - _NAMED_MAX} more hosts are also slow)" if len(far) > _NAMED_MAX else ""
    fastest = _shown(max(bandwidths.values()))
    return f"{', '.join(named)} to the {peers} workers{more}; the fastest host has {fastest}"


def _in_order(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one < other else (other, one)


def _shown(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:,.1f} MB/s"

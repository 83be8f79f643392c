"""Publishes the bandwidths that workers measured between each other, for the pool controller.

Each worker writes a key beside its record (registry.py), with the same time to live:
    {tandem:CLUSTER}:worker:ID:pairs  msgpack, peer's worker id -> bytes/s

A bandwidth is 4 MiB (`_PULL_BYTES`) divided by the predicted time of a pull of 4 MiB. The time
includes the latency: a latency of 10 ms and a transfer of 30 ms give 4 MiB / 40 ms = 100 MiB/s. The
rate without latency (`PairRate.bytes_per_s`) is not published, because its measurement is almost
arbitrary if pulls are small or a host is busy.

The bandwidths have a key of their own, because the controller's Redis user may not access the
worker records. Otherwise it could change the addresses in them, which all processes trust.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from tandem.common.perf_model.rates import PairRate
from tandem.net.store.client import UNREADABLE, SyncClient
from tandem.net.store.control_state import control_key

_PULL_BYTES = 4 << 20


def pairs_key(record_key: str) -> str:
    return f"{record_key}:pairs"


def encode_bandwidths(pairs: Mapping[str, PairRate]) -> bytes:
    """Encodes the bandwidths of pulls from each peer as msgpack. A peer whose rate is not measured
    yet is left out."""
    bandwidths = {
        peer: _PULL_BYTES / rate.seconds(_PULL_BYTES)
        for peer, rate in pairs.items()
        if rate.is_measured and 0 < rate.bytes_per_s < math.inf
    }
    return msgspec.msgpack.encode(bandwidths)


def read_pair_bandwidths(
    redis: SyncClient, cluster_id: str, worker_ids: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Returns bandwidths in bytes/s. `result["b"]["a"]` is the bandwidth when the worker b pulls
    from the worker a. A worker that has published no bandwidths is left out.

    Values that this version cannot read are skipped. Raises the errors in
    `store.client.UNREACHABLE`.
    """
    if not worker_ids:
        return {}
    keys = [pairs_key(control_key(cluster_id, f"worker:{name}")) for name in worker_ids]
    found = {}
    for worker_id, value in zip(worker_ids, redis.mget(keys), strict=True):
        assert not isinstance(value, str)  # This client returns bytes, not text.
        try:
            found[worker_id] = msgspec.msgpack.decode(value or b"", type=dict[str, float])
        except UNREADABLE:
            continue
    return found

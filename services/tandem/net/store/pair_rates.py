"""Publishes the bandwidths that workers measured between each other, for the pool controller.

Each worker writes a key beside its record (registry.py), with the same time to live:
    {tandem:CLUSTER}:worker:ID:pairs  msgpack, peer's worker id -> bytes/s

A bandwidth is `_PULL_BYTES` (4 MiB) divided by the predicted time of a pull of this size. The time
includes the latency: 10 ms of latency and 30 ms of transfer give 100 MiB/s. `PairRate.bytes_per_s`
leaves out the latency. That rate would be misleading: while pulls are small or a host is busy, its
measurement is almost arbitrary.

The bandwidths have a key of their own because the controller's Redis user may not access worker
records: all processes rely on the addresses in the records.
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
    """Encodes, as msgpack, the bandwidth from each peer to a worker. Peers without a measured rate
    are left out."""
    bandwidths = {
        peer: _PULL_BYTES / rate.seconds(_PULL_BYTES)
        for peer, rate in pairs.items()
        if rate.is_measured and 0 < rate.bytes_per_s < math.inf
    }
    return msgspec.msgpack.encode(bandwidths)


def read_pair_bandwidths(
    redis: SyncClient, cluster_id: str, worker_ids: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Returns bandwidths in bytes/s. `result["b"]["a"]` is the bandwidth of pulls by the worker b
    from the worker a. Workers without a record are left out.

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

"""Publishes the workers' measured bandwidths between each other for the pool controller.

Each worker writes a key beside its record (registry.py), with the same time to live:
    {tandem:CLUSTER}:worker:ID:pairs  msgpack, peer's worker id -> bytes/s
The bandwidth is that of a pull of `_PULL_BYTES` with its latency. The fitted bytes per second alone
would be misleading: while pulls are small or a host is busy, it is almost arbitrary.
The controller may read this key but not the record, whose addresses all processes rely on.
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
    """Encodes the measured bandwidths of a worker's pairs, without default rates."""
    bandwidths = {
        peer: _PULL_BYTES / rate.seconds(_PULL_BYTES)
        for peer, rate in pairs.items()
        if rate.is_measured and 0 < rate.bytes_per_s < math.inf
    }
    return msgspec.msgpack.encode(bandwidths)


def read_pair_bandwidths(
    redis: SyncClient, cluster_id: str, worker_ids: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Returns worker id -> peer's worker id -> bytes/s for the workers that have a record.

    Values that this version cannot read are skipped. Raises the errors in
    `store.client.UNREACHABLE`.
    """
    if not worker_ids:
        return {}
    keys = [pairs_key(control_key(cluster_id, f"worker:{name}")) for name in worker_ids]
    found = {}
    for worker_id, value in zip(worker_ids, redis.mget(keys), strict=True):
        assert not isinstance(value, str)  # replies are not decoded
        try:
            found[worker_id] = msgspec.msgpack.decode(value or b"", type=dict[str, float])
        except UNREADABLE:
            continue
    return found

"""Tells the pool controller how fast blocks come to workers, as they measured it.

Each worker writes a key beside its record (registry.py), with the same time to live:

    {tandem:CLUSTER}:worker:ID:pairs  msgpack, peer's worker id -> bytes/s

It is the bandwidth of a pull of `_PULL_BYTES` with its latency. The part of a fit that grows with
the bytes says little alone: while pulls are small or a host is busy, it is almost any number.

The controller may read this key and not the record, on whose addresses all others rely.
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
    """Encodes the bandwidths of a worker's pairs. Only what was measured counts, not the first
    guesses."""
    bandwidths = {
        peer: _PULL_BYTES / rate.seconds(_PULL_BYTES)
        for peer, rate in pairs.items()
        if rate.is_measured and 0 < rate.bytes_per_s < math.inf
    }
    return msgspec.msgpack.encode(bandwidths)


def read_pair_bandwidths(
    redis: SyncClient, cluster_id: str, worker_ids: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Returns worker id -> peer's worker id -> bytes/s for those of these workers that have a
    record.

    What this version cannot read is left out. Raises what `store.client.UNREACHABLE` lists.
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

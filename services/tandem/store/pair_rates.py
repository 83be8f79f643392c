"""Reads from the workers' records how fast the blocks of their peers come, for the pool controller.

The keys are those of registry.py. Only what was measured counts, not the first guesses.
"""

import math

import msgspec

from tandem.perf_model.rates import PairRate
from tandem.store.client import UNREADABLE, SyncClient
from tandem.store.control_state import control_key


class _Record(msgspec.Struct):
    """The part of a worker's record that is read here."""

    pairs: dict[str, PairRate] = {}


def read_pair_bandwidths(redis: SyncClient, cluster_id: str) -> dict[str, dict[str, float]]:
    """Returns worker id -> peer's worker id -> bytes/s for all workers that have a record.

    A record that this version cannot read is left out. Raises what `store.client.UNREACHABLE`
    lists.
    """
    members = redis.smembers(control_key(cluster_id, "workers"))
    worker_ids = sorted(_bytes(m).decode(errors="replace") for m in members)
    if not worker_ids:
        return {}
    values = redis.mget([control_key(cluster_id, f"worker:{name}") for name in worker_ids])
    found = {}
    for worker_id, value in zip(worker_ids, values, strict=True):
        try:
            pairs = msgspec.msgpack.decode(_bytes(value), type=_Record).pairs
        except UNREADABLE:
            continue
        found[worker_id] = {
            peer: rate.bytes_per_s
            for peer, rate in pairs.items()
            if rate.is_measured and 0 < rate.bytes_per_s < math.inf
        }
    return found


def _bytes(value: bytes | str | None) -> bytes:
    """Narrows the type: replies are not decoded. A record that has expired is None, and is read as
    one that cannot be."""
    assert not isinstance(value, str)
    return value or b""

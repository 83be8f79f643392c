"""The traffic that each router has counted, for the screen of `tandem up`.

    {tandem:CLUSTER}:traffic:ROUTER    STRING, msgpack Traffic, with a time to live

A router writes its counts every few seconds. Readers compare two reads to get rates.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import msgspec

from tandem.net.store.client import UNREADABLE, Client, SyncClient

_TTL_MS = 30_000


class Traffic(msgspec.Struct, frozen=True):
    """Counts of one router. `num_in_router` is the number of open requests that no worker has at
    the time of the write. All other counts only grow, from 0 at the router's start."""

    num_requests: int = 0  # number of requests that ended
    prompt_tokens: int = 0
    cached_tokens: int = 0  # number of prompt tokens whose KV was cached
    output_tokens: int = 0
    num_in_router: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        """Returns the counts of two models of one router together."""
        return Traffic(
            *map(operator.add, msgspec.structs.astuple(self), msgspec.structs.astuple(other))
        )


async def write_traffic(redis: Client, cluster_id: str, router_id: str, traffic: Traffic) -> None:
    """Writes a router's counts. Errors of redis-py propagate."""
    key = _key(cluster_id, router_id)
    await redis.set(key, msgspec.msgpack.encode(traffic), px=_TTL_MS)


def read_traffic(
    redis: SyncClient, cluster_id: str, router_ids: Iterable[str]
) -> dict[str, Traffic]:
    """Returns the counts of each router that has written them in the last 30 s. Errors of redis-py
    propagate."""
    found = {}
    for router_id in router_ids:
        value = redis.get(_key(cluster_id, router_id))
        if isinstance(value, bytes):
            try:
                found[router_id] = msgspec.msgpack.decode(value, type=Traffic)
            except UNREADABLE:
                continue
    return found


def _key(cluster_id: str, router_id: str) -> str:
    return f"{{tandem:{cluster_id}}}:traffic:{router_id}"

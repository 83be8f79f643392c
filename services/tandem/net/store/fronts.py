"""Addresses of the fronts in Redis. A front is a router for one decode worker: a gateway that has
chosen the worker for a request sends the request to the worker's front.

    {tandem:CLUSTER}:front:WORKER    HOST:PORT of the front's HTTP API, with a time to live
A front renews the entry as long as it can serve requests. An endpoint picker, which chooses workers
for a gateway, reads the entries of all workers that it knows.
"""

from collections.abc import Sequence

from tandem.net.store.client import Client

KEPT_MS = 5000
WRITTEN_S = 1.0


class Fronts:
    """Reads and writes the entries of a cluster's fronts. Errors of redis-py propagate."""

    def __init__(self, redis: Client, cluster_id: str) -> None:
        self._redis = redis
        self._prefix = f"{{tandem:{cluster_id}}}:front:"

    async def announce(self, worker_id: str, endpoint: str) -> None:
        """Writes the entry of the front of a worker. `endpoint` is the HOST:PORT of the front."""
        await self._redis.set(self._prefix + worker_id, endpoint, px=KEPT_MS)

    async def remove(self, worker_id: str) -> None:
        await self._redis.delete(self._prefix + worker_id)

    async def read(self, worker_ids: Sequence[str]) -> dict[str, str]:
        """Returns worker id -> endpoint of the worker's front. Workers without a front are left
        out."""
        if not worker_ids:
            return {}
        found = await self._redis.mget([self._prefix + worker_id for worker_id in worker_ids])
        pairs = zip(worker_ids, found, strict=True)
        return {w: bytes(found).decode() for w, found in pairs if isinstance(found, bytes)}

"""The prefix tree as routers use it: look-ups in a replica, everything else in Redis."""

from collections.abc import Sequence

from tandem.net.store.client import Client
from tandem.prefix_index.redis import RedisIndex
from tandem.prefix_index.replica import Replica


class ReplicatedIndex(RedisIndex):
    """A `RedisIndex` that looks up prompts in a replica, and in Redis while the replica cannot be
    used."""

    def __init__(self, redis: Client, cluster_id: str, replica: Replica) -> None:
        super().__init__(redis, cluster_id)
        self.replica = replica
        self.num_local = 0  # number of look-ups that the replica answered
        self.num_asked = 0  # number of look-ups for which Redis was asked

    async def match(self, block_hashes: Sequence[bytes], *, closed: bool = True) -> dict[str, int]:
        found = self.replica.match(block_hashes, closed=closed)
        if found is not None:
            self.num_local += 1
            return found
        self.num_asked += 1
        return await super().match(block_hashes, closed=closed)

    async def forget(self, worker_id: str) -> None:
        known = self.replica.generations(worker_id)
        try:
            await super().forget(worker_id)
        finally:
            self.replica.drop(known)  # the log drops them, too, unless Redis does not answer

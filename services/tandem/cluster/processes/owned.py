"""Stores the state that the pool controller must not lose: the wanted pool sizes, the hosts, and
the members with their states.

  cluster                 where the state is stored
  on one machine          file `controller.json` in the run folder
  machines can join       key `owned` in Redis, fenced (head_lease.py), with a copy in the same file

Only the controller writes the state. It does so before it sends commands, and again if Redis has
lost the state.

Keepers read the state (keeper.py). A keeper may not know of a command to drain its process that an
earlier keeper received, and the controller may not run at that time. So the keeper looks up whether
the process is still wanted.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tandem.cluster.pools import ClusterSpec, Host, Leave, Member
from tandem.cluster.processes.head_lease import fenced_set
from tandem.common.config.cluster import PoolName
from tandem.net.store.client import UNREACHABLE, SyncClient, connect_blocking
from tandem.net.store.pair_rates import read_pair_bandwidths

log = logging.getLogger(__name__)

_FILE = "controller.json"
_SPEC_FILE = "spec.json"


class Owned(msgspec.Struct):
    wanted: dict[PoolName, int]
    members: list[Member]
    number: int = 0  # fencing number of the head whose controller wrote this state
    # hosts that were not lost when this state was written; a new Ray head waits for them to join
    hosts: list[Host] = []

    def wants(self, keeper_name: str) -> bool:
        """Says whether the process of this keeper should run: it is in `members`, and is not
        draining, gone or lost."""
        return any(m.keeper_name == keeper_name and not m.leaves for m in self.members)

    def was_started(self, keeper_name: str) -> bool:
        """Says whether the keeper's process was started before, by this keeper or an earlier
        one."""
        return any(m.keeper_name == keeper_name and m.state != "pending" for m in self.members)

    def write(self, run_folder: Path) -> None:
        fresh = (run_folder / _FILE).with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(self))
        fresh.replace(run_folder / _FILE)


def read(run_folder: Path) -> Owned | None:
    """Reads the state from the file. Returns None if no controller has written the file yet."""
    try:
        return msgspec.json.decode((run_folder / _FILE).read_bytes(), type=Owned)
    except FileNotFoundError:
        return None


def read_spec(run_folder: Path) -> ClusterSpec:
    """Reads the spec of this host in a cluster of several hosts."""
    return msgspec.json.decode((run_folder / _SPEC_FILE).read_bytes(), type=ClusterSpec)


def write_spec(run_folder: Path, spec: ClusterSpec) -> None:
    (run_folder / _SPEC_FILE).write_bytes(msgspec.json.encode(spec))


def read_leaving(redis: SyncClient, cluster_id: str) -> dict[str, Leave]:
    """Reads the hosts that want to leave. Returns host id -> "leaves" (its processes keep running
    for now) or "drains" (they are drained). Raises the exceptions in `store.client.UNREACHABLE`."""
    found = redis.smembers(f"{{tandem:{cluster_id}}}:leaving")
    words = sorted(w.decode() if isinstance(w, bytes) else str(w) for w in found)
    return {
        host: "drains" if f"{host} drains" in words else "leaves"
        for host in (word for word in words if " " not in word)
    }


def write_leaving(redis: SyncClient, cluster_id: str, host_id: str, leave: Leave) -> None:
    """Records for the controller that a host wants to leave. Raises the same exceptions as
    `read_leaving`."""
    words = [host_id, f"{host_id} drains"] if leave == "drains" else [host_id]
    redis.sadd(f"{{tandem:{cluster_id}}}:leaving", *words)


def forget_leaving(redis: SyncClient, cluster_id: str, host_id: str) -> None:
    redis.srem(f"{{tandem:{cluster_id}}}:leaving", host_id, f"{host_id} drains")


class SharedOwned:
    """The controller's state in Redis, for all hosts. `number` is the fencing number of the
    controller's head."""

    def __init__(self, redis_url: str, cluster_id: str, number: int) -> None:
        self._redis_url = redis_url
        self._cluster_id = cluster_id
        self._number = number
        self._client: SyncClient | None = None

    def read(self) -> Owned | None:
        """Reads the state; None if Redis does not have it or is unreachable."""
        try:
            found = self._redis().get(f"{{tandem:{self._cluster_id}}}:owned")
        except UNREACHABLE as error:
            log.warning("the pool controller's state cannot be read from Redis: %s", error)
            return None
        return msgspec.json.decode(found, type=Owned) if isinstance(found, bytes | str) else None

    def write(self, owned: Owned) -> bool:
        """Writes the state. Returns False if a later controller has taken over. Raises the
        exceptions in `store.client.UNREACHABLE`."""
        values = {"owned": msgspec.json.encode(owned)}
        return fenced_set(self._redis(), self._cluster_id, self._number, values)

    def has(self, encoded: bytes) -> bool:
        """Says whether Redis holds exactly this encoded state. Returns True while Redis is
        unreachable, so that the caller does not try to write the state again."""
        try:
            return bool(self._redis().get(f"{{tandem:{self._cluster_id}}}:owned") == encoded)
        except UNREACHABLE:
            return True

    def leaving(self) -> dict[str, Leave]:
        """Reads the hosts that want to leave, as `read_leaving` does; none while Redis is
        unreachable."""
        try:
            return read_leaving(self._redis(), self._cluster_id)
        except UNREACHABLE:
            return {}

    def pair_bandwidths(self, worker_ids: Sequence[str]) -> dict[str, dict[str, float]]:
        """Reads the bandwidths that these workers measured: worker id -> peer's worker id ->
        bytes/s. Empty while Redis is unreachable or refuses the read."""
        try:
            return read_pair_bandwidths(self._redis(), self._cluster_id, worker_ids)
        except UNREACHABLE as error:
            log.info(
                "the bandwidths between workers cannot be read from Redis (%s), so hosts for new "
                "workers are chosen without regard to bandwidth",
                error,
            )
            return {}

    def _redis(self) -> SyncClient:
        if self._client is None:
            self._client = connect_blocking(self._redis_url)
        return self._client

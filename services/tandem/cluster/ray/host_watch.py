"""Tracks the hosts that the pool controller may use, from Ray's list of nodes.

  state      meaning                                                           gets new members
  expected   belonged to the previous head, has not joined the new one yet     yes
  alive      Ray reports the host's node as alive                              yes
  silent     Ray has reported the node as dead for at most `LOST_AFTER_S`      no
  lost       was silent or expected for too long                               no

A silent host keeps its members, because a restarted raylet is back soon. The members of a lost host
are replaced on other hosts. A silent or lost host becomes alive when its node is back.

A host is expected for `FIRST_JOIN_S` after the start of a new head. New members may be placed on an
expected host, and the host's agent starts them when the host joins. Otherwise all new members would
go to the hosts that join first, and would have to move again later. Only the host of the previous
head is not expected and counts as lost at once, because it was already silent for a whole lease.

If Ray starts and ends its nodes itself, each alive Ray node is a host, with Ray's node id. A
restarted node is a different host.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from tandem.cluster.pools import Host
from tandem.cluster.ray.node import (
    CORES_LABEL,
    GPUS_LABEL,
    HOST_LABEL,
    NODE_LABEL,
    NUMA_LABEL,
    read_cores,
)

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
LOST_AFTER_S = 6.0
FIRST_JOIN_S = 20.0


class HostWatch:
    """Tracks the hosts. `alive` maps host ids to the hosts that Ray reports as alive."""

    def __init__(
        self, own: Host | None, host_before: str = "", expected: Iterable[Host] = ()
    ) -> None:
        """`own` is this host; if it is None, all Ray nodes are hosts. `expected` has the hosts of
        the previous head."""
        self._label = NODE_LABEL if own is None else HOST_LABEL
        self._own = {} if own is None else {own.host_id: own}
        self._host_before = host_before
        self.alive: dict[str, Host] = dict(self._own)
        self._known = {**{host.host_id: host for host in expected}, **self._own}
        self._seen_at: dict[str, float] = {}
        self._started_at = time.monotonic()

    def is_lost(self, host_id: str) -> bool:
        """Says whether a host is lost, so that its members are replaced on other hosts."""
        if host_id in self.alive:
            return False
        if host_id not in self._seen_at:
            waits_s = 0.0 if host_id == self._host_before else FIRST_JOIN_S
            return time.monotonic() - self._started_at > waits_s
        return time.monotonic() - self._seen_at[host_id] > LOST_AFTER_S

    def known(self) -> list[Host]:
        """Lists the hosts that are not lost."""
        return [host for host in self._known.values() if not self.is_lost(host.host_id)]

    def usable(self) -> list[Host]:
        """Lists the hosts that can take members: alive ones and expected ones."""
        return [
            host
            for host in self.known()
            if host.host_id in self.alive or host.host_id not in self._seen_at
        ]

    def start(self, changed: Callable[[], None]) -> None:
        """Starts a thread that calls `changed` every INTERVAL_S. `changed` must make the
        controller's own thread call `update`."""

        def tick() -> None:
            while True:
                changed()
                time.sleep(INTERVAL_S)

        threading.Thread(target=tick, name="hosts", daemon=True).start()

    def update(self) -> None:
        """Reads Ray's nodes. Changes nothing if Ray does not answer."""
        import ray

        with suppress(ray.exceptions.RayError, RuntimeError):
            self._take(ray.nodes())

    def _take(self, nodes: list[dict[str, Any]]) -> None:
        alive = dict(self._own)
        for node in nodes:
            labels = dict(node.get("Labels") or {})
            if not node.get("Alive") or self._label not in labels:
                continue
            host_id = labels[self._label]
            cores = read_cores(labels.get(CORES_LABEL, ""))
            resources = dict(node.get("Resources") or {})
            num_gpus = int(labels.get(GPUS_LABEL, 0))
            numa = [int(num) for num in labels.get(NUMA_LABEL, "").split("_") if num]
            alive[host_id] = Host(host_id, cores, labels, resources, num_gpus, numa)
            self._seen_at[host_id] = time.monotonic()
        for host_id in alive.keys() - self.alive.keys():
            log.info("host %s has joined", host_id)
        for host_id in self.alive.keys() - alive.keys():
            log.warning("host %s does not answer", host_id)
        self.alive = alive
        self._known.update(alive)

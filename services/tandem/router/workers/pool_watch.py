"""Watches pool sizes, and finds pools on Kubernetes whose workers do not start. Does no I/O.

    state of a pool                          is it a problem?
    all requested workers are ready          no
    a worker is not ready, but has a row     no, because the worker's row (`rows.py`) shows it
    a requested worker has no row            yes, after `grace_s` seconds, until all are ready

A worker without a row is, for example, a pod that waits for a node or for its image. Such a pod has
no process that could report. Pools of a pool controller are left out, because the controller's
agents report why a process does not run.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from tandem.common.config.cluster import ROUTER_POOLS, pool_name, role_of
from tandem.net.store.registry import WorkerRecord
from tandem.router.workers.pools import pool_states
from tandem.router.workers.rows import WorkerRow

_GONE = {"stopped", "lost", "failed"}  # states of a worker's row after the worker's process ended


class PoolWatch:
    """Watches the sizes of pools.

    The caller passes the sizes to `note`. `problems` has phrases for the headline of the operators'
    page.
    """

    def __init__(self, grace_s: float = 90.0, group: str = "") -> None:
        """`grace_s` is the time in seconds that a new worker has to start. `group` is the group of
        the pools; "": that of the first model."""
        self.grace_s = grace_s
        self._group = group
        # pool -> sizes reported by Kubernetes; empty if Kubernetes does not own the sizes
        self.owned: dict[str, dict[str, int]] = {}
        self.sizes: dict[str, int] = {}  # pool -> last requested number of workers
        self.ready: dict[str, int] = {}  # pool -> number of ready workers
        self._have_agents: set[str] = set()
        # pool -> monotonic time since which the pool has had fewer ready workers than requested
        self._short_since: dict[str, float] = {}
        self._now = 0.0

    def states(
        self, records: Iterable[WorkerRecord], pools_json: bytes | None
    ) -> dict[str, dict[str, Any]]:
        """Returns the state of each pool: requested size, running workers and counts of records."""
        states = pool_states(records, pools_json)
        owned = {pool: {**states.get(pool, {}), **sizes} for pool, sizes in self.owned.items()}
        return {**states, **owned}

    def note(
        self, pools: Mapping[str, Mapping[str, Any]], rows: Iterable[WorkerRow], now: float
    ) -> None:
        """Takes the states of the pools and the rows of the workers at `now`, a monotonic time."""
        self._now = now
        known = Counter(row.pool for row in rows if row.state not in _GONE)
        self.sizes |= {name: s["wanted"] for name, s in pools.items() if "wanted" in s}
        self.ready = {name: s["ready"] for name, s in pools.items() if name not in ROUTER_POOLS}
        for name, ready in self.ready.items():
            if "agents" in pools[name]:
                # A pool is never removed from this set, because Redis may lose the list of agents.
                self._have_agents.add(name)
            size = 0 if name in self._have_agents else self.sizes.get(name, 0)
            if ready < size and (known[name] < size or self._is_overdue(name)):
                self._short_since.setdefault(name, now)
            else:
                self._short_since.pop(name, None)

    @property
    def problems(self) -> dict[str, str]:
        """A phrase for each pool whose workers do not start."""
        short = {
            pool_name(self._group, role_of(name)): (self.ready[name], self.sizes[name])
            for name in self._short_since
            if self._is_overdue(name)
        }
        return {
            f"{pool} pool": f"the {pool} pool has {ready} of {size} workers ready; `kubectl get "
            "pods` shows what the others wait for"
            for pool, (ready, size) in short.items()
        }

    def _is_overdue(self, name: str) -> bool:
        return self._now - self._short_since.get(name, self._now) > self.grace_s

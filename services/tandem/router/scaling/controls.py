"""Makes operators' changes to the pools of all models of a router. Each model has a
`ClusterControl`; this module finds the one that a change is for.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

from tandem.common.config.cluster import WORKER_POOLS, group_of, pool_name, role_of
from tandem.common.pool_sizes import check_sizes, sized_pools
from tandem.errors import WorkerNotFound
from tandem.net.security.audit_trail import Caller
from tandem.router.scaling.control import ClusterControl, RoleSet


class ClusterControls:
    """The controls of a router's models. The arguments and errors of the methods are those of
    `ClusterControl`."""

    def __init__(self, first: ClusterControl, *others: ClusterControl) -> None:
        self.first = first
        self._by_group = {each.group: each for each in (first, *others)}

    def __iter__(self) -> Iterator[ClusterControl]:
        return iter(self._by_group.values())

    async def scale(self, wanted: dict[str, Any], *, who: Caller) -> dict[str, int]:
        """Requests pool sizes. The pools of a further model have the name of its group before, as
        in {"qwen.decode": 2}."""
        if len(self._by_group) > 1:
            others = [pool_name(g, role) for g in self._by_group if g for role in WORKER_POOLS]
            check_sizes(wanted, sized_pools(others))  # before any of them is set
        by_group: dict[str, dict[str, Any]] = {}
        for pool, size in wanted.items():
            group = group_of(pool) if group_of(pool) in self._by_group else self.first.group
            by_group.setdefault(group, {})[pool.removeprefix(f"{group}.")] = size
        sizes: dict[str, int] = {}
        # An empty request goes to the first control, which refuses it.
        for group, own in (by_group or {self.first.group: wanted}).items():
            found = await self._by_group[group].scale(own, who=who)
            sizes |= {pool_name(group, role_of(pool)): size for pool, size in found.items()}
        return sizes

    async def set_role(self, worker_id: str, role: str = "", *, who: Caller) -> RoleSet:
        return await self.of(worker_id).set_role(worker_id, role, who=who)

    async def drain(
        self, worker_id: str, deadline_s: Any, *, force: bool = False, who: Caller
    ) -> None:
        await self.of(worker_id).drain(worker_id, deadline_s, force=force, who=who)

    async def reset_prefix_cache(self, worker_id: str = "", *, who: Caller) -> dict[str, int]:
        if worker_id:
            return await self.of(worker_id).reset_prefix_cache(worker_id, who=who)
        found = await asyncio.gather(*(each.reset_prefix_cache(who=who) for each in self))
        return {worker: number for dropped in found for worker, number in dropped.items()}

    def of(self, worker_id: str) -> ClusterControl:
        """Returns the control of the model that this worker serves or has served. If no model has
        such a worker, returns the first control, which refuses the change; with several models
        raises WorkerNotFound."""
        for control in self:
            known = {worker.record.worker_id for worker in control.view.known()}
            if worker_id in known or worker_id in control.view.gone:
                return control
        if len(self._by_group) == 1:
            return self.first
        names = sorted(w.record.worker_id for control in self for w in control.view.known())
        raise WorkerNotFound(
            f"there is no worker {worker_id[:80]!r}; there are: {', '.join(names) or 'none'}"
        )

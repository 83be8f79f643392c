"""Requests pool sizes from the program that owns the sizes.

Owner                   When                How the router requests a size
a pool controller       Ray, `tandem up`    writes the sizes to the controller's list in Redis
Kubernetes' API server  `--scale-objects`   patches the scale of each pool's object
an HPA, KEDA, a person  otherwise           not at all; the owner reads the router's metrics
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.common.config.cluster import pool_name, role_of
from tandem.common.config.router import RouterConfig
from tandem.errors import NotNow, TandemError
from tandem.net.security.audit_trail import AuditTrail, Caller
from tandem.router.scaling.changes import logged_change, shown_sizes
from tandem.router.workers.cluster_view import ClusterView
from tandem.router.workers.pools import decode_pools, request_sizes

if TYPE_CHECKING:
    from tandem.router.scaling.kubernetes.scale import KubernetesScale

log = logging.getLogger(__name__)

_KUBERNETES_KEPT_S = 2.0
_KUBERNETES_WATCH_S = 10.0
_CONTROLLER_START_S = 3.0
_HEAD_START_S = 60.0
# Longest wait in seconds for the present sizes. A change reads them only for its log line, so it
# does not wait longer.
_BEFORE_DEADLINE_S = 1.0


class SizeOwner:
    """A router's access to the owner of the sizes. Raises errors of services/tandem/errors.py."""

    def __init__(self, config: RouterConfig, view: ClusterView, trail: AuditTrail) -> None:
        self._trail = trail
        self._cluster_id = config.cluster.cluster_id
        self._group = config.group
        self._view = view
        self._kubernetes: KubernetesScale | None = None
        self._read_at = -math.inf
        if config.scale_objects:
            # Import late, because the module loads an HTTP client that other routers do not need.
            from tandem.router.scaling.kubernetes.scale import KubernetesScale

            self._kubernetes = KubernetesScale(config.scale_objects, Path(config.service_account))

    async def sizes(self) -> dict[str, int]:
        """Returns the sizes of the pools that this router can set.

        A size includes workers that are starting.
        """
        if self._kubernetes is not None:
            return await self._kubernetes.sizes()
        pools = decode_pools(self._view.pools_json)
        return {pool: int(state["wanted"]) for pool, state in pools.items() if "wanted" in state}

    async def pools(self) -> dict[str, dict[str, Any]]:
        """Returns the state of each pool: requested size, running workers and workers' records.

        Sizes from Kubernetes are at most `_KUBERNETES_KEPT_S` seconds old. They are missing while
        the API server does not answer.
        """
        if asyncio.get_running_loop().time() - self._read_at > _KUBERNETES_KEPT_S:
            await self._read_kubernetes()
        records = [worker.record for worker in self._view.known()]
        return self._view.pool_watch.states(records, self._view.pools_json)

    async def watch(self) -> None:
        """Reads the sizes from Kubernetes periodically, until it is cancelled.

        The metrics and the cluster view's list of problems use these sizes.
        """
        while True:
            try:
                await self._read_kubernetes()
            except Exception:
                log.exception("the sizes of the pools cannot be read; requests are still served")
            await asyncio.sleep(_KUBERNETES_WATCH_S)

    async def _read_kubernetes(self) -> None:
        if self._kubernetes is None:
            return
        self._read_at = asyncio.get_running_loop().time()
        owned = dict[str, dict[str, int]]()
        with suppress(TandemError, TimeoutError):
            async with asyncio.timeout(_BEFORE_DEADLINE_S):
                owned = await self._kubernetes.pools()
        self._view.pool_watch.owned = owned

    async def set_sizes(self, sizes: Mapping[str, int], *, who: Caller) -> None:
        """Requests the sizes from their owner and logs the caller.

        The caller polls the pool state to see when the pools have these sizes. Raises NotNow if
        this router can reach no owner of the sizes.
        """
        about = f"sizes of {self._group}" if self._group else "sizes"
        with logged_change(self._trail, who, about) as change:
            change.after = shown_sizes(sizes)
            before: dict[str, int] = {}
            with suppress(TandemError, TimeoutError):
                async with asyncio.timeout(_BEFORE_DEADLINE_S):
                    before = await self.sizes()
            change.before = shown_sizes({pool: before.get(pool, "unknown") for pool in sizes})
            if self._kubernetes is not None:
                await self._kubernetes.set_sizes(sizes)
            elif others := self._of_others(sizes):
                how = (
                    "start the cluster with encode workers (`tandem up --encode 1`)"
                    if others[0] == "encode"
                    else "on Kubernetes, set it with `kubectl scale deployment NAME --replicas=N` "
                    "or an HPA"
                )
                raise NotNow(
                    f"the pool controller cannot set the size of the {others[0]} pool; {how}"
                )
            elif not await self._request_from_controller(dict(sizes)):
                raise NotNow(
                    "this router cannot set pool sizes: no pool controller runs, and "
                    "--scale-objects is not set. On Kubernetes, set pool sizes with `kubectl "
                    "scale statefulset NAME --replicas=N`, or with the pool's HPA, KEDA or "
                    "RayCluster"
                )

    def _of_others(self, sizes: Mapping[str, int]) -> list[str]:
        """Returns the pools in `sizes` that the pool controller does not own.

        The result is empty if no controller has written its pools to Redis.
        """
        pools = decode_pools(self._view.pools_json)
        return sorted(sizes.keys() - pools.keys()) if pools else []

    async def _request_from_controller(self, sizes: dict[str, int]) -> bool:
        """Requests sizes from the pool controller; returns False if there is no controller.

        The request is repeated for up to a minute while Ray's head starts, and otherwise for 3 s: a
        controller that has just started needs a moment to write its pools to Redis.
        """
        sizes = {pool_name(self._group, role_of(name)): size for name, size in sizes.items()}
        now = asyncio.get_running_loop().time
        began = now()
        while not await request_sizes(self._view.redis, self._cluster_id, sizes):
            is_starting = self._view.control.head_is_starting
            if now() - began > (_HEAD_START_S if is_starting else _CONTROLLER_START_S):
                return False
            await asyncio.sleep(0.1)
        return True

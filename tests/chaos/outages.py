"""Outages of processes other than workers in a kept cluster, one after another.

kill redis       and restart it after the given time at the same address, empty
stop redis       SIGSTOP, later SIGCONT
kill router      it or its gRPC replica; the controller restarts it; its open streams are lost
kill controller  head.py restarts the pool controller
kill head        GCS, raylet and controller; a new head after the given time
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from random import Random

import httpx

from tests.chaos.faults import Fault, Happened
from tests.chaos.load import RouterLife
from tests.chaos.pool_faults import Striker
from tests.harness.cluster import CONTROLLER
from tests.harness.kept_cluster import KeptCluster

_ROUTERS = {"router": "--router-id router-0 ", "grpc": "--router-id grpc-0 "}  # by their pools


class Outages(Striker):
    def __init__(
        self,
        cluster: KeptCluster,
        rng: Random,
        router: RouterLife,
        *,
        num_requests: Callable[[], int],
        happened: list[Happened],
    ) -> None:
        super().__init__(cluster, rng, num_requests=num_requests, happened=happened)
        self._router = router
        self._router_pids: dict[str, int] = {}  # by their pools

    async def _strike(self, fault: Fault) -> None:
        await self._until(self._is_answered)
        what, _, whom = fault.kind.partition(" ")
        self._note(fault, whom)
        match whom:
            case "redis":
                await self._redis(fault, is_killed=what == "kill")
            case "router":
                await self._kill_router()
            case "controller":
                await self._until(self._kill_controller)
            case "head":
                await self._kill_head(fault)
        await self._until(self._is_answered)

    async def _redis(self, fault: Fault, *, is_killed: bool) -> None:
        redis = self._cluster.redis
        if is_killed:
            await asyncio.to_thread(redis.kill)
        else:
            os.kill(redis.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.duration_s)
        finally:
            if is_killed:
                await asyncio.to_thread(redis.start)
            else:
                os.kill(redis.pid, signal.SIGCONT)

    async def _kill_router(self) -> None:
        await self._until(lambda: not self._router.num_retries and self._is_answered())
        pool = self._rng.choice(sorted(self._router_pids))
        with self._router.death():
            os.kill(self._router_pids[pool], signal.SIGKILL)
            await self._until(self._is_ready)

    def _kill_controller(self) -> bool:
        os.kill(self._cluster.pid(CONTROLLER), signal.SIGKILL)
        return True

    def _is_ready(self) -> bool:
        return all(httpx.get(u, timeout=5).status_code == 200 for u in self._cluster.ready_urls)

    async def _kill_head(self, fault: Fault) -> None:
        self._cluster.kill_head()
        try:
            await asyncio.sleep(fault.duration_s)
        finally:
            await asyncio.to_thread(self._cluster.start_head)

    def _is_answered(self) -> bool:
        """Says whether the router processes that the controller started are running and answer.

        A controller that was just killed may still report the previous processes.
        """
        found = {}
        for pool, name in _ROUTERS.items():
            pids = list(self._cluster.pids(pool).values())
            if pids != [self._cluster.pid(name)]:
                return False
            found[pool] = pids[0]
        self._router_pids = found
        return self._is_ready()

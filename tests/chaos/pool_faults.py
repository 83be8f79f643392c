"""Faults of a cluster whose workers Ray's agents keep, from outside and by its own controls.

    Crashes  kill -9 and SIGSTOP of any worker, one after the other: none before the last one is
             started again, for a request may lose two workers and no third
    Orders   drain, flip and scale over HTTP, as an operator's, all the while

Each goes through its deck again and again, shuffled, and each takes who is there at random.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from random import Random

import httpx
import psutil

from tests.chaos.faults import Fault, Happened, flip, stop
from tests.harness.kept_cluster import KeptCluster, KeptWorker

_POLL_S = 0.2
_BACK_WITHIN_S = 600.0  # on a machine that has little time for it, too


class _Striker(ABC):
    """`happened`: every fault that came about."""

    def __init__(
        self,
        cluster: KeptCluster,
        rng: Random,
        *,
        num_requests: Callable[[], int],
        happened: list[Happened],
    ) -> None:
        self._cluster = cluster
        self._rng = rng
        self._num_requests = num_requests
        self._happened = happened
        self._started_at = time.monotonic()

    async def run(self, deck: Sequence[Fault], *, pause_s: float) -> None:
        """Strikes one fault after the other, at random moments, until it is cancelled."""
        for fault in self._shuffled(deck):
            await asyncio.sleep(self._rng.uniform(0, pause_s))
            await self._strike(fault)

    @abstractmethod
    async def _strike(self, fault: Fault) -> None:
        """Returns when it is over and its worker serves again."""

    def _shuffled(self, deck: Sequence[Fault]) -> Iterator[Fault]:
        for _ in itertools.count():
            yield from self._rng.sample(deck, len(deck))

    async def _any_worker(self, role: str = "") -> KeptWorker:
        """Returns a random worker of the role, or of any role if there is none."""
        found = await asyncio.to_thread(lambda: sorted(self._cluster.workers.items()))
        workers = [worker for _, worker in found]
        return self._rng.choice([w for w in workers if w.role == role] or workers)

    def _note(self, fault: Fault, what: str) -> Happened:
        at_s = time.monotonic() - self._started_at
        noted = Happened(fault, what, at_s, self._num_requests(), self._held(what))
        self._happened.append(noted)
        return noted

    def _held(self, worker_id: str) -> int:
        record = self._cluster.records().get(worker_id)
        if record is None:
            return 0
        load = record["load"]
        held = sum(load[name] for name in ("num_running", "num_waiting", "num_leases", "num_pulls"))
        return max(held, record["requests_here"])

    async def _until(self, probe: Callable[[], bool]) -> None:
        async with asyncio.timeout(_BACK_WITHIN_S):
            while not await asyncio.to_thread(probe):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)


class Crashes(_Striker):
    _role = "prefill"  # of the worker struck last: a short run strikes both pools, too

    async def _strike(self, fault: Fault) -> None:
        await self._until(self._cluster.is_whole)
        self._role = "decode" if self._role == "prefill" else "prefill"
        worker = await self._any_worker(self._role)
        noted = self._note(fault, worker.worker_id)
        try:
            if fault.kind == "kill":
                os.kill(worker.pid, signal.SIGKILL)
            else:
                await stop(worker.pid, fault.duration_s)
        except (ProcessLookupError, psutil.NoSuchProcess):  # it was drained just then
            self._happened.remove(noted)


class Orders(_Striker):
    async def _strike(self, fault: Fault) -> None:
        if fault.kind == "scale":
            await self._scale(fault)
            return
        worker = await self._any_worker()
        if fault.kind == "drain":
            await self._drain(fault, worker)
        else:
            await self._flip(fault, worker)

    async def _scale(self, fault: Fault) -> None:
        """One worker more in a pool, for so long; then the newest of it goes."""
        pool = self._rng.choice(("prefill", "decode"))
        pools = (await asyncio.to_thread(self._cluster.state))["pools"]
        size = pools[pool]["wanted"]
        self._note(fault, pool)
        for wanted in (size + 1, size):
            reply = await self._post("/v1/cluster", {pool: wanted})
            assert reply.status_code == 202, reply.text
            await self._until(lambda wanted=wanted: self._has(pool, wanted))
            await asyncio.sleep(fault.duration_s)

    def _has(self, pool: str, size: int) -> bool:
        """Its processes run or are on their way; one that was killed meanwhile may be away."""
        told = self._cluster.state()["pools"][pool]
        return told["wanted"] == size == len(told["agents"]) and told["ready"] >= size - 1

    async def _drain(self, fault: Fault, worker: KeptWorker) -> None:
        noted = self._note(fault, worker.worker_id)
        reply = await self._post(f"/v1/cluster/workers/{worker.worker_id}/drain", {})
        if reply.status_code != 202:  # it was killed just then, or all other decode workers were
            assert reply.status_code in (404, 409, 503), reply.text
            self._happened.remove(noted)
            return
        await self._until(lambda: self._is_another(worker))

    def _is_another(self, worker: KeptWorker) -> bool:
        """Started again, or gone with a pool that has become smaller."""
        agents = [a["id"] for p in self._cluster.state()["pools"].values() for a in p["agents"]]
        now = self._cluster.workers.get(worker.worker_id)
        return worker.worker_id not in agents or (now is not None and now.pid != worker.pid)

    async def _flip(self, fault: Fault, worker: KeptWorker) -> None:
        there, back = "prefill", "decode"
        if worker.role == "prefill":
            there, back = back, there
        if await flip(self._cluster, worker.worker_id, there):
            self._note(fault, worker.worker_id)
            await asyncio.sleep(fault.duration_s)
            await flip(self._cluster, worker.worker_id, back)

    async def _post(self, path: str, body: dict[str, object]) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self._cluster.admin_url, timeout=20) as client:
            return await client.post(path, json=body)

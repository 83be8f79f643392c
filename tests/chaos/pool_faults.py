"""Faults of a cluster whose workers Ray's agents keep, injected from outside and by its own
controls.

Crashes  kill -9, SIGSTOP, hang and cut of any worker, one after another; each waits until the last
         worker was restarted, because a request may lose two workers but not three
Orders   drain, flip and scale over HTTP like an operator, continuously

outages.py has faults of other processes. Each class goes through its shuffled deck repeatedly, and
selects workers at random.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from random import Random

import httpx
import psutil

from tests.chaos.faults import Fault, Happened, flip, stop
from tests.harness.kept_cluster import KeptCluster, KeptWorker

_POLL_S = 0.2
_BACK_WITHIN_S = 600.0  # long enough for a machine with little CPU time for the cluster


class Striker(ABC):
    """Injects faults; `happened` has those that took effect."""

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
        """Injects one fault after another, at random moments, until it is cancelled."""
        for fault in self._shuffled(deck):
            await asyncio.sleep(self._rng.uniform(0, pause_s))
            await self._strike(fault)

    @abstractmethod
    async def _strike(self, fault: Fault) -> None:
        """Injects the fault. Returns when it is over and its worker serves again."""

    def _shuffled(self, deck: Sequence[Fault]) -> Iterator[Fault]:
        for _ in itertools.count():
            yield from self._rng.sample(deck, len(deck))

    async def _any_worker(self, role: str = "") -> KeptWorker:
        """Selects a random worker of the role, or of any role if there is none."""
        workers: list[KeptWorker] = []

        def found() -> bool:
            by_id = self._cluster.workers
            workers[:] = [by_id[worker_id] for worker_id in sorted(by_id)]
            return bool(workers)

        await self._until(found)
        return self._rng.choice([w for w in workers if w.role == role] or workers)

    def _note(self, fault: Fault, what: str) -> Happened:
        at_s = time.monotonic() - self._started_at
        noted = Happened(fault, what, at_s, self._num_requests(), self._held(what))
        self._happened.append(noted)
        return noted

    def _held(self, worker_id: str) -> int:
        try:
            record = self._cluster.records()[worker_id]
        except (KeyError, httpx.TransportError):  # there is no such pool, or no router
            return 0
        load = record["load"]
        held = sum(load[name] for name in ("num_running", "num_waiting", "num_leases", "num_pulls"))
        return max(held, record["requests_here"])

    async def _until(self, probe: Callable[[], bool]) -> None:
        """Waits until `probe` returns True. A router that does not answer was killed, so the probe
        is repeated."""
        async with asyncio.timeout(_BACK_WITHIN_S):
            while not await asyncio.to_thread(_answered, probe):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)


def _answered(probe: Callable[[], bool]) -> bool:
    try:
        return probe()
    except (httpx.TransportError, LookupError):
        return False


class Crashes(Striker):
    # role of the worker that was struck last, so that even a short run strikes both pools
    _role = "prefill"

    async def _strike(self, fault: Fault) -> None:
        await self._until(self._cluster.is_whole)
        self._role = "decode" if self._role == "prefill" else "prefill"
        worker = await self._any_worker(self._role)
        if fault.kind == "cut":
            await self._cut(fault)
            return
        noted = self._note(fault, worker.worker_id)
        try:
            if fault.kind == "kill":
                os.kill(worker.pid, signal.SIGKILL)
            else:
                is_engine_only = fault.kind == "hang"
                await stop(worker.pid, fault.duration_s, is_engine_only=is_engine_only)
        except (ProcessLookupError, psutil.NoSuchProcess):  # the worker was just drained
            self._happened.remove(noted)

    async def _cut(self, fault: Fault) -> None:
        """Cuts the network of one of the workers that are not at home."""
        network = self._cluster.network
        places = self._cluster.places
        assert network is not None
        worker_id = self._rng.choice(sorted(places))
        self._note(fault, worker_id)
        network.cut(places[worker_id])
        try:
            await asyncio.sleep(fault.duration_s)
        finally:
            network.heal(places[worker_id])


class Orders(Striker):
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
        """Adds a worker to a pool, and removes the newest one after the given time."""
        pool = self._rng.choice(("prefill", "decode"))
        size = self._cluster.sizes[pool]
        self._note(fault, pool)
        for wanted in (size + 1, size):
            await self._resize(pool, wanted)
            await self._until(lambda wanted=wanted: self._has(pool, wanted))
            await asyncio.sleep(fault.duration_s)

    async def _resize(self, pool: str, size: int) -> None:
        """Requests a pool size, and repeats the request while Redis is unreachable."""
        async with asyncio.timeout(_BACK_WITHIN_S):
            while (reply := await self._post("/v1/cluster", {pool: size})).status_code != 202:
                assert reply.status_code == 503, reply.text
                await asyncio.sleep(_POLL_S)

    def _has(self, pool: str, size: int) -> bool:
        """Says whether the pool has its processes or is starting them; one may be down because it
        was just killed."""
        state = self._cluster.state()["pools"][pool]
        return state["wanted"] == size == len(state["agents"]) and state["ready"] >= size - 1

    async def _drain(self, fault: Fault, worker: KeptWorker) -> None:
        noted = self._note(fault, worker.worker_id)
        reply = await self._post(f"/v1/cluster/workers/{worker.worker_id}/drain", {})
        if reply.status_code != 202:  # it, or all other decode workers, were just killed
            assert reply.status_code in (404, 409, 503), reply.text
            self._happened.remove(noted)
            return
        await self._until(lambda: self._is_another(worker))

    def _is_another(self, worker: KeptWorker) -> bool:
        """Says whether the worker was restarted, or removed with a smaller pool."""
        agents = [a["id"] for p in self._cluster.state()["pools"].values() for a in p["agents"]]
        now = self._cluster.workers.get(worker.worker_id)
        return worker.worker_id not in agents or (now is not None and now.pid != worker.pid)

    async def _flip(self, fault: Fault, worker: KeptWorker) -> None:
        away = "prefill"
        back = "decode"
        if worker.role == "prefill":
            away, back = back, away
        if await flip(self._cluster, worker.worker_id, away):
            self._note(fault, worker.worker_id)
            await asyncio.sleep(fault.duration_s)
            await flip(self._cluster, worker.worker_id, back)

    async def _post(self, path: str, body: dict[str, object]) -> httpx.Response:
        """Posts a request, and repeats it while there is no router; a killed router may already
        have handled it."""
        async with (
            httpx.AsyncClient(base_url=self._cluster.admin_url, timeout=20) as client,
            asyncio.timeout(_BACK_WITHIN_S),
        ):
            while True:
                with suppress(httpx.TransportError):
                    return await client.post(path, json=body)
                await asyncio.sleep(_POLL_S)

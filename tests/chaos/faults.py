"""The faults of a chaos run, and the keeper that restarts workers.

kill  kill -9 of the worker and its engine; the keeper restarts it
drain SIGTERM: it drains and exits with status 0; the keeper restarts it
flip  it is moved to the other pool, and back later
stop  SIGSTOP of both its processes, later SIGCONT
hang  SIGSTOP of the engine alone: the I/O process answers pings and sends heartbeats
cut   its network drops all packets in both directions

Workers of several ranks (--tensor-parallel) get two more faults:

kill rank  kill -9 of one rank other than rank 0; its worker ends, and the keeper restarts it
stop rank  SIGSTOP of one rank other than rank 0, later SIGCONT; the engine waits for the rank

A worker may also end by itself (if its engine hangs, for example); the keeper restarts it, too. If
Ray's agents keep the workers, pool_faults.py injects faults into them, and outages.py into other
processes.
"""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

import grpc
import httpx
import psutil

from tests.harness.cluster import LocalCluster, Served, WorkerProcess, wait_for
from tests.harness.network import Network, Place

Kind = Literal[
    *("kill", "drain", "flip", "scale", "stop", "hang", "cut", "kill rank", "stop rank"),
    *("kill redis", "stop redis", "kill router", "kill controller", "kill head"),
]

_POLL_S = 0.05
_BUSY_WITHIN_S = 10.0  # a worker that is idle for this time gets its fault anyway
_BACK_WITHIN_S = 120.0
_RANK_MODULE = "tandem.engine.executor.rank_program"


@dataclass(frozen=True)
class Fault:
    kind: Kind
    duration_s: float = 0.0

    @property
    def is_hang_for_ever(self) -> bool:
        """True if it lasts longer than a worker waits for its engine, so that the worker ends."""
        return self.kind in ("hang", "stop rank") and self.duration_s >= 30

    @property
    def is_end(self) -> bool:
        """True if a busy worker ends by itself because of this fault."""
        return self.is_hang_for_ever or self.kind == "kill rank"

    def __str__(self) -> str:
        return f"{self.kind} {self.duration_s:g} s" if self.duration_s else self.kind


@dataclass
class Happened:
    """A fault, and the activity at the time when it was injected."""

    fault: Fault
    worker_id: str
    at_s: float
    num_requests: int  # open requests in the cluster
    num_held: int  # leases, pulls and sequences of this worker
    # Seconds from a fault that should end the worker to its end; inf: the worker did not end. None:
    # another fault, or the run ended first.
    ended_after_s: float | None = None

    def __str__(self) -> str:
        ended = f"ended after {self.ended_after_s:.1f} s" if self.ended_after_s else ""
        return (
            f"{self.at_s:6.1f} s  {self.worker_id}  {self.fault}"
            f"  (requests {self.num_requests}, here {self.num_held})"
            f"  {'did not end' if self.ended_after_s == math.inf else ended}"
        ).rstrip()


class Keeper:
    """Starts workers and restarts those that end. `ends` has those that ended by themselves, and
    how.

    Status 0 is the end of a drain, which never starts by itself.
    """

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._starts: dict[str, Callable[[], WorkerProcess]] = {}
        self.ends: list[tuple[str, int]] = []

    def start(self, worker_id: str, role: str, *options: str, at: Place | None = None) -> None:
        self._starts[worker_id] = lambda: self._cluster.start_worker(
            worker_id, role, *options, at=at
        )
        self._starts[worker_id]()

    async def run(self) -> None:
        """Restarts ended workers, like a supervisor. Never returns."""
        while True:
            for worker_id, start in self._starts.items():
                status = self._cluster.workers[worker_id].process.poll()
                if status is not None:
                    if status not in (0, -signal.SIGKILL):
                        self.ends.append((worker_id, status))
                    start()
            await asyncio.sleep(_POLL_S)

    def wait_ready(self) -> None:
        """Waits until every worker is ready, including one that was just killed, and pairs are
        connected.

        Call it in a thread while `run` is running, because `run` restarts the workers.
        """
        try:
            wait_for(
                lambda: not self._away(), deadline_s=_BACK_WITHIN_S, what="the workers' return"
            )
        except TimeoutError as error:
            raise AssertionError(f"away, with the status of their ends: {self._away()}") from error
        self._cluster.wait_ready()

    def _away(self) -> dict[str, int | None]:
        """The workers that are not ready, and their exit status; None while the process runs."""
        workers = self._cluster.workers.values()
        return {w.worker_id: w.process.poll() for w in workers if not self._cluster.is_ready(w)}


class Striker:
    """Injects one fault after another into a worker, at random moments while it is busy."""

    def __init__(
        self,
        cluster: LocalCluster,
        worker_id: str,
        rng: Random,
        *,
        num_requests: Callable[[], int],
        cable: tuple[Network, Place] | None,
        happened: list[Happened],
    ) -> None:
        self._cluster = cluster
        self._worker_id = worker_id
        self._rng = rng
        self._num_requests = num_requests
        self._cable = cable
        self._started_at = time.monotonic()
        self._happened = happened

    async def run(self, faults: Iterable[Fault], *, pause_s: float) -> None:
        for fault in faults:
            await asyncio.sleep(self._rng.uniform(0, pause_s))
            num_held = await self._busy()
            await asyncio.sleep(self._rng.uniform(0, 0.5))
            at_s = time.monotonic() - self._started_at
            happened = Happened(fault, self._worker_id, at_s, self._num_requests(), num_held)
            self._happened.append(happened)
            worker = self._cluster.workers[self._worker_id]
            await self._strike(fault, worker)
            if fault.is_end and _runs(worker.process.pid):
                happened.ended_after_s = math.inf
            elif fault.is_end:
                happened.ended_after_s = time.monotonic() - self._started_at - at_s
                # Threads of an ended process may still run for a moment. Until they end, `poll`
                # reports no status, and the router's record still says that the worker is ready.
                await asyncio.to_thread(worker.process.wait, _BACK_WITHIN_S)
            await self._until(self._is_ready, _BACK_WITHIN_S)

    async def _strike(self, fault: Fault, worker: WorkerProcess) -> None:
        match fault.kind:
            case "kill":
                worker.kill()
            case "drain":
                worker.process.terminate()
                assert await asyncio.to_thread(worker.process.wait, _BACK_WITHIN_S) == 0
            case "flip":
                for role in ("prefill", "decode"):
                    await flip(self._cluster, self._worker_id, role)
                    await asyncio.sleep(fault.duration_s)
            case "stop" | "hang":
                is_engine_only = fault.kind == "hang"
                await stop(worker.process.pid, fault.duration_s, is_engine_only=is_engine_only)
            case "kill rank":
                self._rng.choice(other_ranks(worker)).kill()
                await asyncio.to_thread(worker.process.wait, _BACK_WITHIN_S)
            case "stop rank":
                rank = self._rng.choice(other_ranks(worker))
                await stop_processes([rank], fault.duration_s, worker.process.pid)
            case "cut":
                assert self._cable is not None
                network, place = self._cable
                network.cut(place)
                try:
                    await asyncio.sleep(fault.duration_s)
                finally:
                    network.heal(place)

    async def _busy(self) -> int:
        """Waits until the worker has requests, leases or pulls. Returns their number."""
        found = 0

        def is_busy() -> bool:
            nonlocal found
            if not self._is_ready():
                return False
            try:
                load = self._cluster.workers[self._worker_id].state().load
            except grpc.RpcError:  # the worker ended by itself
                return False
            found = load.num_leases + load.num_pulls + load.num_running + load.num_waiting
            return bool(found)

        try:
            await self._until(is_busy, _BUSY_WITHIN_S)
        except TimeoutError:
            return 0
        return found

    def _is_ready(self) -> bool:
        """Says whether the router sees the running process as ready."""
        return self._cluster.is_ready(self._cluster.workers[self._worker_id])

    async def _until(self, probe: Callable[[], bool], deadline_s: float) -> None:
        async with asyncio.timeout(deadline_s):
            while not await asyncio.to_thread(probe):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)


async def stop(pid: int, duration_s: float, *, is_engine_only: bool = False) -> None:
    """Sends SIGSTOP to a worker and its engine, and SIGCONT after that time, or when the worker
    ends."""
    worker = psutil.Process(pid)
    stopped = worker.children(recursive=True)
    if not is_engine_only:
        stopped.append(worker)
    await stop_processes(stopped, duration_s, pid)


async def stop_processes(
    stopped: Sequence[psutil.Process], duration_s: float, worker_pid: int
) -> None:
    """Sends SIGSTOP to processes, and SIGCONT after that time, or when their worker ends."""
    for each in stopped:
        each.suspend()
    try:
        deadline = time.monotonic() + duration_s
        while time.monotonic() < deadline and _runs(worker_pid):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
    finally:
        for each in stopped:
            if each.is_running():
                each.resume()


def other_ranks(worker: WorkerProcess) -> list[psutil.Process]:
    """The processes of the worker's ranks but the first."""
    return [
        process
        for process in psutil.Process(worker.process.pid).children(recursive=True)
        if is_rank(process.pid)
    ]


def is_rank(pid: int) -> bool:
    """Says whether this is a running process of a rank other than rank 0."""
    try:
        return _RANK_MODULE in psutil.Process(pid).cmdline()
    except psutil.NoSuchProcess:
        return False


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def flip(cluster: Served, worker_id: str, role: str) -> bool:
    """Moves a worker to a pool. Returns whether it is in that pool now: moving the last decode
    worker is refused, and an unreachable worker cannot be moved."""
    path = f"/v1/cluster/workers/{worker_id}/role"
    async with httpx.AsyncClient(base_url=cluster.admin_url, timeout=20) as client:
        try:
            reply = await client.post(path, json={"role": role})
        except httpx.TransportError:  # a router that was just killed may still have moved it
            return False
    assert reply.status_code in (200, 404, 409, 503), reply.text
    return reply.status_code == 200

"""A cluster under load for long: does anything of it grow?

    python -m benchmarks.soak.soak [--minutes 30] [--load 0.7] [--prefill 1] [--decode 1]

Starts `tandem up` on free ports and measures its capacity with the very mix (8 clients that ask
again at once). Then turns of chats arrive at that share of it, Poisson, half over HTTP and half
over gRPC: a turn begins a chat or goes on with one (at most 6 turns, so its prefix is there, and
pulled), and one client in ten leaves in the middle. Before it counts, what is bounded is filled:
the KV pools, the routers' logs of requests, and the memory of many requests at once, which Python
keeps.

Every 5 s: memory (RSS, PSS, its own), descriptors and threads of each process of the cluster; index
lag, leases, pulls, sequences and quarantine of each worker; Redis' own memory; the size of the
logs. At the end the slope an hour over the last two thirds, by least squares with its standard
error (neighbours that are alike count for less), and for each PASS, or FAIL where it grows for
certain, by more than 5% and 1 MiB an hour (3 for what is counted). What is held when the load is
over must go to zero within 30 s.

Writes benchmarks/results/soak.json, each minute and also when it is interrupted; exit status 1 when
something grows. A run of a few minutes shows that it works, not that nothing grows.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import grpc.aio
import httpx
import redis.asyncio

from benchmarks.shared.cluster import Cluster, up
from benchmarks.soak.chat_clients import REQUEST_DEADLINE_S, Clients
from benchmarks.soak.process_growth import FLAT_COUNT, MIB, ClusterProcesses, Series
from tandem.client import InferenceStub
from tandem.router.request.log import REQUESTS_MAX
from tandem_bench.framework import RESULTS, options, quantile, run_main, table, write

NUM_BLOCKS = 1500  # of each worker: small, so that all of it was used before anything counts
SAMPLE_S = 5.0
WRITE_S = 60.0
IDLE_WITHIN_S = 30.0
CLIENTS = 8
FILLING_CLIENTS = 32  # more at once end sooner, because a step has more rows
OPEN_BEFORE = 64  # turns at once before it counts
OPEN_MAX = 128  # turns at once: a cluster that hangs must not fill this process
GAUGES = ("num_leases", "num_pulls", "num_running", "num_waiting", "blocks_quarantined")
GROWING = ("num_leases", "num_pulls", "blocks_quarantined", "index_lag_blocks")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Soak:
    """One run; `result` is whole at any time."""

    def __init__(self, options: Options, cluster: Cluster) -> None:
        self._options = options
        self._cluster = cluster
        self._began = time.monotonic()
        self._gauges: dict[str, Series] = {}
        self._run_folder: Path | None = None
        self._redis: redis.asyncio.Redis | None = None
        self.processes: ClusterProcesses | None = None
        self.clients: Clients | None = None
        self.capacity = 0.0
        self.held: dict[str, float] = {}  # when the load is over and 30 s have passed
        self.state = "starting"
        self.skipped = 0

    async def run(self, stop: asyncio.Event) -> None:
        limits = httpx.Limits(max_connections=4 * OPEN_MAX)
        async with (
            httpx.AsyncClient(
                base_url=self._cluster.url, timeout=REQUEST_DEADLINE_S, limits=limits
            ) as http,
            grpc.aio.insecure_channel(self._cluster.grpc_address) as channel,
        ):
            stub = InferenceStub(channel)  # type: ignore[no-untyped-call]
            self.clients = Clients(http, stub, self._options.seed)
            self._find(self._cluster.state())
            self.state = "filling"
            await self._fill(http, self.clients)
            self.capacity = self._options.capacity or await self._measure_capacity()
            print(f"capacity {self.capacity:.2f} turns/s", flush=True)
            self._began = time.monotonic()
            self.clients.outcomes.clear()
            self.clients.ttft_s.clear()
            self.state = "under load"
            watching = asyncio.create_task(self._watch(http, stop))
            try:
                await self._load(stop)
                self.state = "interrupted" if stop.is_set() else "whole"
                await self._wait_idle(http)
            finally:
                watching.cancel()
                with suppress(asyncio.CancelledError):
                    await watching
                if self._redis is not None:
                    await self._redis.aclose()

    async def _state(self, http: httpx.AsyncClient) -> dict[str, Any]:
        return dict((await http.get(f"{self._cluster.admin_url}/v1/cluster")).json())

    def _find(self, state: dict[str, Any]) -> None:
        """The cluster's processes, and by the environment of one its Redis and its logs."""
        self.processes = ClusterProcesses(state["cluster_id"], self._cluster.process.pid)
        worker = Path(f"/proc/{state['workers'][0]['pid']}")
        variables = (worker / "environ").read_bytes().decode().split("\0")
        environment = dict(v.partition("=")[::2] for v in variables)
        self._redis = redis.asyncio.Redis.from_url(environment["TANDEM_REDIS_URL"])
        self._run_folder = Path(os.readlink(worker / "fd/2")).parent

    async def _fill(self, http: httpx.AsyncClient, clients: Clients) -> None:
        """Fills the routers' logs with requests of the very mix, and the pools with blocks.

        Then a record that is measured takes the place of one of its own kind. Raises RuntimeError
        when a turn fails.
        """
        left = iter(range(self._options.fill))

        async def fill() -> None:
            for _ in left:
                await clients.turn(may_leave=False)

        await asyncio.gather(*(fill() for _ in range(FILLING_CLIENTS)))
        at_once = OPEN_BEFORE if self._options.fill else 0
        await asyncio.gather(*(clients.turn(may_leave=False) for _ in range(at_once)))
        if failures := [what for what in clients.outcomes if not what.endswith(": ended")]:
            raise RuntimeError(f"turns failed before any load: {failures}")
        for number in range(NUM_BLOCKS * 20 // 2000 if self._options.fill else 0):
            prompt = [(token * 31 + number * 7919) % 40_000 + 100 for token in range(2000)]
            body = {"prompt": prompt, "max_tokens": 4}
            (await http.post("/v1/completions", json=body)).raise_for_status()

    async def _measure_capacity(self) -> float:
        assert self.clients is not None
        until = time.monotonic() + self._options.capacity_seconds
        clients, ended = self.clients, 0

        async def keep_asking() -> None:
            nonlocal ended
            while time.monotonic() < until:
                await clients.turn(may_leave=False)
                ended += time.monotonic() < until

        await asyncio.gather(*(keep_asking() for _ in range(CLIENTS)))
        return ended / self._options.capacity_seconds

    async def _load(self, stop: asyncio.Event) -> None:
        """Turns at their times, until it is over or `stop` is set; then those under way end."""
        assert self.clients is not None
        rng, rate = Random("arrivals"), self._options.load * self.capacity
        until = self._began + 60 * self._options.minutes
        at, turns = time.monotonic(), set[asyncio.Task[None]]()
        while (at := at + rng.expovariate(rate)) < until:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, at - time.monotonic())):
                    await stop.wait()
            if stop.is_set():
                break
            if self.clients.num_open >= OPEN_MAX:
                self.skipped += 1
                continue
            task = asyncio.create_task(self.clients.turn())
            turns.add(task)
            task.add_done_callback(turns.discard)
        if turns:
            await asyncio.wait(turns, timeout=REQUEST_DEADLINE_S)

    async def _watch(self, http: httpx.AsyncClient, stop: asyncio.Event) -> None:
        written = time.monotonic()
        for number in itertools.count(1):
            if self._cluster.process.poll() is not None:
                stop.set()
            try:
                await self._sample(http)
            except (httpx.HTTPError, redis.RedisError, OSError) as error:
                print(f"a sample is missing: {error!r}", flush=True)
            if time.monotonic() - written > WRITE_S:
                written = time.monotonic()
                await asyncio.to_thread(self.write)
            await asyncio.sleep(max(0.0, self._began + number * SAMPLE_S - time.monotonic()))

    async def _sample(self, http: httpx.AsyncClient) -> None:
        assert self.processes is not None
        assert self._redis is not None
        await asyncio.to_thread(self.processes.sample)
        at_s = time.monotonic() - self._began
        for name, value in (await self._held(http)).items():
            self._gauge(name, at_s, value)
        memory = await self._redis.info("memory")
        self._gauge("redis used_memory_mib", at_s, memory["used_memory"] / MIB)
        if self._run_folder is not None:
            size = sum(file.stat().st_size for file in self._run_folder.glob("*.log"))
            self._gauge("logs_mib", at_s, size / MIB)
        if self.clients is not None:
            self._gauge("clients num_open", at_s, self.clients.num_open)

    async def _held(self, http: httpx.AsyncClient) -> dict[str, float]:
        """Returns the load that workers hold for requests, and the lag of the tree."""
        held: dict[str, float] = {}
        for worker in (await self._state(http))["workers"]:
            name = worker["worker_id"]
            held |= {f"{name} {gauge}": worker["load"][gauge] for gauge in GAUGES}
            text = (await http.get(f"http://{worker['metrics_address']}/metrics")).text
            for line in text.splitlines():
                if line.startswith("tandem_index_lag_blocks{"):
                    held[f"{name} index_lag_blocks"] = float(line.rsplit(" ", 1)[1])
        return held

    async def _wait_idle(self, http: httpx.AsyncClient) -> None:
        deadline = time.monotonic() + IDLE_WITHIN_S
        while any(found := await self._held(http)) and time.monotonic() < deadline:
            self.held = {name: value for name, value in found.items() if value}
            if not self.held:
                return
            await asyncio.sleep(1.0)

    def _gauge(self, name: str, at_s: float, value: float) -> None:
        self._gauges.setdefault(name, Series()).add(at_s, value)

    def result(self) -> dict[str, Any]:
        processes = self.processes.series if self.processes is not None else {}
        seconds = time.monotonic() - self._began
        clients = self.clients
        outcomes = dict(sorted(clients.outcomes.items())) if clients is not None else {}
        failures = {
            outcome: count
            for outcome, count in outcomes.items()
            if not outcome.endswith((": ended", ": left"))
        }
        told = {name: s.summary() for name, s in sorted(processes.items()) if s.pss_mib.values}
        gauges = {
            name: series.summary(flat_share=0.05, flat=FLAT_COUNT)
            for name, series in sorted(self._gauges.items())
        }
        growing = [f"{name} {what}" for name, s in processes.items() for what in s.grows]
        growing += [
            name
            for name, found in gauges.items()
            if found["grows"] and name.endswith((*GROWING, "used_memory_mib"))
        ]
        ttft_s = clients.ttft_s if clients is not None else []
        return {
            "state": self.state,
            "minutes": round(seconds / 60, 2),
            "load": self._options.load,
            "capacity_per_s": self.capacity,
            "turns": outcomes,
            "turns_skipped": self.skipped,
            "ttft_ms": {f"p{p}": 1000 * quantile(ttft_s, p / 100) for p in (50, 99)},
            "failures": failures,
            "held_at_the_end": self.held,
            "growing": growing,
            "processes": told,
            "gauges": gauges,
            "samples": {
                name: {
                    "at_s": [round(t, 1) for t in s.pss_mib.at_s],
                    "own_mib": [round(v, 2) for v in s.own_mib.values],
                    "descriptors": s.descriptors.values,
                }
                for name, s in sorted(processes.items())
            },
            "load_average": os.getloadavg(),
        }

    def write(self) -> None:
        write(self._options.json, self.result())


@options
class Options:
    minutes: float = 30.0
    load: float = 0.7
    """Share of the capacity."""
    capacity: float = 0.0
    """Turns/s that the cluster can serve. 0: it is measured first."""
    capacity_seconds: float = 30.0
    fill: int = 2 * REQUESTS_MAX + 500
    """Requests before anything counts: more than fit into the logs of both routers."""
    prefill: int = 1
    """Prefill workers."""
    decode: int = 1
    """Decode workers."""
    seed: int = 0
    json: Path = RESULTS / "soak.json"


def main(options: Options = Options()) -> int:
    pools = ("--prefill", str(options.prefill), "--decode", str(options.decode))
    with up(*pools, "--num-blocks", str(NUM_BLOCKS)) as cluster:
        soak = Soak(options, cluster)
        try:
            asyncio.run(run(soak))
        finally:
            for number in SIGNALS:  # a second signal must not end what cleans up
                signal.signal(number, signal.SIG_IGN)
            soak.write()
    result = soak.result()
    print_tables(result)
    bad = result["growing"] or result["held_at_the_end"] or result["failures"]
    return bool(bad) or soak.state != "whole"


async def run(soak: Soak) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    work = asyncio.create_task(soak.run(stop))

    def interrupt() -> None:
        """Once: what is under way ends. Again: at once."""
        if stop.is_set() or soak.state != "under load":
            work.cancel()
        stop.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, interrupt)
    with suppress(asyncio.CancelledError):
        await work


def print_tables(result: dict[str, Any]) -> None:
    print(f"{result['state']}: {result['minutes']:.1f} min at {result['load']:.0%} of")
    print(f"{result['capacity_per_s']:.2f} turns/s; turns: {result['turns']}")
    rows = []
    for name, found in result["processes"].items():
        pss, own, fds = found["pss_mib"], found["own_mib"], found["descriptors"]
        rows.append(
            (
                f"{name}{' (ended)' if found['ended'] else ''}",
                f"{pss['last']:.1f}, {own['last']:.1f}",
                f"{own['per_hour']:+.2f} ± {own['error']:.2f}",
                f"{fds['last']:.0f}",
                f"{fds['per_hour']:+.1f} ± {fds['error']:.1f}",
                "FAIL" if any(g.startswith(f"{name} ") for g in result["growing"]) else "PASS",
            )
        )
    columns = "process | PSS, own at the end (MiB) | own an hour (MiB) | descriptors | an hour | "
    print(table(columns, rows))
    gauges = (
        (
            name,
            f"{found['max']:.2f}",
            f"{found['last']:.2f}",
            f"{found['per_hour']:+.2f} ± {found['error']:.2f}",
        )
        for name, found in result["gauges"].items()
    )
    print(table("of the workers | at most | at the end | an hour", gauges))
    for what in ("growing", "held_at_the_end", "failures"):
        print(f"{'FAIL' if result[what] else 'PASS'}: {what}: {result[what] or 'nothing'}")


if __name__ == "__main__":
    run_main(main)

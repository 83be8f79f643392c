"""Very many requests under every kind of fault, in slices that can be resumed.

    python -m tests.chaos.slices [--requests 100000] [--slice 2000] [--clients 24]
                                      [--keep-router]

Two prefill and two decode workers of a tiny random model, kept by Ray's agents. One worker of each
pool is behind a network of its own. All the while, three at once, come faults of workers
(tests/chaos/pool_faults.py: killed, stopped, hung, cut off), orders (drained, flipped, scaled) and
outages (outages.py: Redis, the router, the pool controller and Ray's head).

Each answer is compared with that of one engine alone. A slice is so many requests, drawn by its own
number. At its end the faults end, all workers return, and nothing may be held. If no router died,
its count of outcomes must be that of the requests that it heard (always with --keep-router, which
kills none). Then its books are added to the JSON file, and the next slice begins, until there are
as many requests as were asked for. When the script is started again it goes on after the last whole
slice. A slice that showed a defect runs again when its line is deleted from the file. SIGTERM and
Ctrl-C end it after the slice under way; the second time at once.

Needs root and /dev/net/tun. Exit status 1 when any slice has a problem.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from random import Random
from typing import Any

import psutil

from benchmarks.soak.process_growth import HOUR_S, name_of, own_memory_mib, slope_per_hour
from tandem.cluster.processes.guardian import cluster_processes
from tandem_bench.framework import RESULTS, options, run_main
from tests.chaos.checks import (
    check_counted,
    errors_logged,
    router_outcomes,
    wait_nothing_held,
    wrong_outcomes,
)
from tests.chaos.faults import Fault, Happened
from tests.chaos.load import Load, Prompt, RouterLife, requests
from tests.chaos.outages import Outages
from tests.chaos.pool_faults import Crashes, Orders
from tests.chaos.references import reference_prompts
from tests.harness.cluster import wait_for
from tests.harness.kept_cluster import KeptCluster
from tests.harness.network import Network, why_not

OPTIONS = (
    *("--num-blocks", "200", "--max-tokens-per-step", "64", "--verify-blocks", "all"),
    *("--prefill-at", "remote", "--local-prefill-max-tokens", "16"),
    # A peer that is stopped is given up sooner than by default.
    *("--heartbeat-timeout", "3", "--pull-deadline", "3", "--engine-hang-timeout", "10"),
)
# 17 s is longer than gRPC's pings wait, 20 s longer than a worker waits for its engine.
CRASHES = (
    *[Fault("kill")] * 6,
    *[Fault("stop", 5)] * 2,
    *[Fault("hang", 5), Fault("hang", 20), Fault("stop", 17)],
    *[Fault("cut", 3), Fault("cut", 8), Fault("cut", 20)],
)
ORDERS = (Fault("drain"), Fault("drain"), Fault("flip", 5), Fault("scale", 5))
OUTAGES = (
    *[Fault("kill redis", 1), Fault("kill redis", 4), Fault("stop redis", 5)],
    *[Fault("kill router")] * 3,
    *[Fault("kill controller")] * 2,
    Fault("kill head", 10),
)
PAUSE_S = 3.0  # between two faults of one sort, at most
NUM_PREFIXES = 24
NUM_EACH = 9
LEAVES_WITHIN_S = 1.0
SHARE_OF_LONG = 0.2
BOUND_S = 300.0  # of one request
BACK_WITHIN_S = 300.0
FREED_WITHIN_S = 90.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Slices:
    """One cluster, and the slices that it serves."""

    def __init__(self, cluster: KeptCluster, prompts: Sequence[Prompt], arguments: Options) -> None:
        self._cluster = cluster
        self._prompts = prompts
        self._arguments = arguments
        self._errors: Counter[str] = Counter()  # of the slices before
        spared = ("kill router",) if arguments.keep_router else ()
        self._outages = tuple(fault for fault in OUTAGES if fault.kind not in spared)

    async def run(self, number: int, count: int) -> dict[str, Any]:
        """Runs a slice and returns its books."""
        rng = Random(number)
        happened: list[Happened] = []
        router = RouterLife()
        wanted = requests(
            Random(rng.random()),
            self._prompts,
            count,
            is_over=lambda: True,
            share_of_long=SHARE_OF_LONG,
            leaves_within_s=LEAVES_WITHIN_S,
        )
        load = Load(
            self._cluster,
            wanted,
            num_clients=self._arguments.clients,
            bound_s=BOUND_S,
            router=router,
        )
        memory = {"start": await asyncio.to_thread(memory_mib, self._cluster)}
        num_before = router_outcomes(self._cluster).total()
        began = time.monotonic()
        await self._strike(load, rng, router, happened)
        seconds = time.monotonic() - began
        problems = wrong_outcomes(load.outcomes) + await asyncio.to_thread(self._after)
        if is_counted := not router.num_deaths:
            problems += self._miscounted(num_before, load)
        memory["end"] = await asyncio.to_thread(memory_mib, self._cluster)
        outcomes = load.outcomes
        return {
            "number": number,
            "requests": sum(not o.is_retry for o in outcomes),
            "outcomes": dict(Counter(o.kind for o in outcomes if not o.is_retry)),
            "retries": dict(Counter(o.kind for o in outcomes if o.is_retry)),
            "left_unheard": sum(not o.was_heard for o in outcomes),
            "is_counted": is_counted,
            "tokens": sum(len(o.token_ids) for o in outcomes),
            "faults": dict(Counter(h.fault.kind for h in happened)),
            "seconds": round(seconds, 1),
            "seconds_in_all": round(time.monotonic() - began, 1),
            "slowest_s": round(max(o.seconds for o in outcomes), 1),
            "problems": problems,
            "memory_mib": memory,
            "load_average": os.getloadavg()[0],
        }

    async def _strike(
        self, load: Load, rng: Random, router: RouterLife, happened: list[Happened]
    ) -> None:
        """All requests, and faults meanwhile; returns when the cluster is whole again."""
        told: dict[str, Any] = {"num_requests": lambda: load.num_running, "happened": happened}
        cluster = self._cluster
        strikers = [
            asyncio.create_task(striker.run(deck, pause_s=PAUSE_S))
            for striker, deck in (
                (Crashes(cluster, Random(rng.random()), **told), CRASHES),
                (Orders(cluster, Random(rng.random()), **told), ORDERS),
                (Outages(cluster, Random(rng.random()), router, **told), self._outages),
            )
        ]
        asking = asyncio.create_task(load.run())
        try:
            await asyncio.wait([asking, *strikers], return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():  # a striker has failed: its error is raised below
                asking.cancel()
        finally:
            for task in strikers:
                task.cancel()
            ended = await asyncio.gather(asking, *strikers, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error
        await asyncio.to_thread(self._whole)

    def _whole(self) -> None:
        with suppress(TimeoutError):
            wait_for(self._sized, deadline_s=60, what="the router")
        wait_for(self._cluster.is_whole, deadline_s=BACK_WITHIN_S, what="the whole cluster")

    def _sized(self) -> bool:
        try:
            self._cluster.scale(**self._cluster.sizes)
        except Exception:  # the router or Redis is not back yet
            return False
        return True

    def _miscounted(self, num_before: int, load: Load) -> list[str]:
        try:
            check_counted(self._cluster, num_before, load.outcomes)
        except AssertionError as error:
            return [f"NOT COUNTED ONCE: {error}"]
        return []

    def _after(self) -> list[str]:
        """Returns what is wrong with the cluster after a slice."""
        problems = []
        try:
            wait_nothing_held(self._cluster, FREED_WITHIN_S)
        except AssertionError as error:
            problems.append(f"HELD: {error}")
        if set(self._cluster.processes().values()) != {1}:
            problems.append(f"a worker runs twice: {self._cluster.processes()}")
        errors = Counter(errors_logged(self._cluster))
        problems += [f"ERROR LOGGED: {e}" for e in (errors - self._errors).elements()]
        self._errors = errors
        return problems


def memory_mib(cluster: KeptCluster) -> dict[str, float]:
    """Returns what processes have of their own (MiB), by kind; of several the mean."""
    found: dict[str, list[float]] = {}
    for pid in cluster_processes(cluster.cluster_id):
        with suppress(psutil.Error, OSError):
            kind = re.sub(r"-\d+|^ray::", "", name_of(psutil.Process(pid)))
            found.setdefault(kind, []).append(own_memory_mib(pid))
    found["redis"] = [own_memory_mib(cluster.redis.pid)]
    return {kind: round(sum(v) / len(v), 2) for kind, v in sorted(found.items())}


def sums(slices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the books of all slices: counts, and a line through each kind's memory."""
    added = {
        name: dict(sum((Counter(s[name]) for s in slices), Counter()))
        for name in ("outcomes", "retries", "faults")
    }
    num_requests = sum(s["requests"] for s in slices)
    seconds = sum(s["seconds"] for s in slices)
    return {
        "requests": num_requests,
        "requests_per_s": round(num_requests / max(seconds, 1.0), 1),
        "hours": round(sum(s["seconds_in_all"] for s in slices) / HOUR_S, 2),
        "tokens": sum(s["tokens"] for s in slices),
        **added,
        "slices_counted": sum(s.get("is_counted", False) for s in slices),
        "left_unheard": sum(s.get("left_unheard", 0) for s in slices),
        "slowest_s": max((s["slowest_s"] for s in slices), default=0.0),
        "problems": sum(len(s["problems"]) for s in slices),
        "memory_mib_per_10000_requests": memory_lines(slices),
    }


def memory_lines(slices: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns a straight line (least squares) through the memory at the ends of the slices."""
    points: dict[str, tuple[list[float], list[float]]] = {}
    at = 0.0
    for each in slices:
        at += each["requests"] / 10_000
        for kind, value in each["memory_mib"]["end"].items():
            here, values = points.setdefault(kind, ([], []))
            here.append(at)
            values.append(value)
    lines = {}
    for kind, (here, values) in points.items():
        if len(values) < len(slices) / 2 or len(values) < 3:  # such as a process that is seldom
            continue
        slope, error = (x / HOUR_S for x in slope_per_hour(here, values))
        first = values[0]
        last = values[-1]
        lines[kind] = {
            "first": first,
            "last": last,
            "max": max(values),
            "slope": round(slope, 2),
            "error": round(error, 2),
        }
    return lines


async def run(cluster: KeptCluster, prompts: list[Prompt], arguments: Options) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    this = asyncio.current_task()
    assert this is not None

    def interrupt() -> None:
        if stop.is_set():
            this.cancel()
        stop.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, interrupt)
    slices = Slices(cluster, prompts, arguments)
    books = read(arguments.books)
    while not stop.is_set() and sums(books)["requests"] < arguments.requests:
        missing = {*range(len(books) + 1)} - {each["number"] for each in books}
        books.append(await slices.run(min(missing), arguments.slice))
        write(arguments.books, books)
        told = {k: v for k, v in books[-1].items() if k not in ("memory_mib", "problems")}
        print(f"{sums(books)['requests']} requests; {told}", flush=True)
        print("\n".join(books[-1]["problems"]), flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())["slices"]) if path.exists() else []


def write(path: Path, slices: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")
    lines = ",\n".join(json.dumps(each) for each in slices)
    summed = json.dumps(sums(slices), indent=1)
    part.write_text(f'{{"sums": {summed},\n"slices": [\n{lines}\n]}}\n')
    part.replace(path)


@options
class Options:
    requests: int = 100_000
    """Requests in all slices."""
    slice: int = 2000
    """Requests of each slice."""
    clients: int = 24
    books: Path = RESULTS / "chaos_slices.json"
    keep_router: bool = False
    """Kill no router."""


def main(arguments: Options = Options()) -> int:
    if reason := why_not():
        sys.exit(reason)
    folder = Path(tempfile.mkdtemp(prefix="c"))  # short: Ray's sockets lie below it
    print(f"logs in {folder}", flush=True)
    with ExitStack() as ends:
        network = ends.enter_context(Network(2))
        model, prompts = reference_prompts(folder / "model", Random(0), NUM_PREFIXES, NUM_EACH)
        kept = KeptCluster(folder, *OPTIONS, model=model, prefill=2, decode=2, network=network)
        cluster = ends.enter_context(closing(kept.start()))
        with suppress(asyncio.CancelledError):
            asyncio.run(run(cluster, prompts, arguments))
    found = sums(read(arguments.books))
    print(json.dumps(found, indent=1))
    return bool(found["problems"])


if __name__ == "__main__":
    run_main(main)

"""Two prefill and two decode workers kept by Ray's agents are killed, stopped, drained, flipped and
scaled while clients request short and long answers. The router keeps running.

In the end every request has ended once with exactly its tokens, nothing is held anywhere, and every
worker runs once. Requests moved in both ways: migrated by a leaving worker, and continued after a
lost one.

The seed is printed. It determines prompts, requests and the order of faults, but not their times.
CHAOS_SEED and CHAOS_REQUESTS override it. CHAOS_MODEL, CHAOS_KV_DTYPE and CHAOS_TENSOR_PARALLEL
select another model, KV data type and number of ranks, as in test_chaos.py.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import closing
from random import Random

import httpx
import pytest

from tandem.router.request.migration_budget import MIGRATION_REASONS
from tests.chaos.checks import (
    check_counted,
    errors_logged,
    router_outcomes,
    summary,
    total,
    wait_nothing_held,
    wrong_outcomes,
)
from tests.chaos.faults import Fault, Happened
from tests.chaos.load import Load, Prompt, answered, computed_prompts, golden_prompts, requests
from tests.chaos.pool_faults import Crashes, Orders
from tests.harness.client import migrations
from tests.harness.cluster import wait_for
from tests.harness.kept_cluster import KeptCluster
from tests.harness.kv_form import KvForm

NUM_REQUESTS = int(os.environ.get("CHAOS_REQUESTS", "2000"))
NUM_CLIENTS = 8
FORM = KvForm.from_environment()
SHARE_OF_LONG = 0.35  # share of answers that are long enough to outlast most faults
LONG_ANSWER = 64
OPTIONS = (
    *("--num-blocks", "120", "--max-tokens-per-step", "64", "--verify-blocks", "all"),
    *("--prefill-at", "remote", *FORM.options),
)
# 17 s is longer than gRPC's ping time-out: the worker counts as lost, and then returns.
CRASHES = (*[Fault("kill")] * 4, *[Fault("stop", 5)] * 2, Fault("stop", 17))
ORDERS = (Fault("drain"), Fault("drain"), Fault("flip", 5), Fault("scale", 5))
KINDS = {fault.kind for fault in (*CRASHES, *ORDERS)}
CRASH_PAUSE_S = 5.0
ORDER_PAUSE_S = 5.0
BOUND_S = 300.0  # time limit of one request
FREED_WITHIN_S = 90.0


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
async def test_nothing_is_lost_while_workers_crash_leave_come_and_change_pools(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    seed = int(os.environ.get("CHAOS_SEED", "1"))
    rng = Random(seed)
    folder = tmp_path_factory.mktemp("run")
    print(f"\nseed {seed}, logs in {folder}")
    model = FORM.model(folder)
    kept = KeptCluster(folder, *OPTIONS, model=model, prefill=2, decode=2)
    with closing(kept.start()) as cluster:
        prompts = await known_prompts(cluster, rng)
        num_before = router_outcomes(cluster).total()
        routers = cluster.pids("router")
        happened: list[Happened] = []
        has_moved = asyncio.Event()  # set when answers have moved in both ways
        wanted = requests(
            Random(rng.random()),
            prompts,
            NUM_REQUESTS,
            is_over=lambda: kinds(happened) == KINDS and has_moved.is_set(),
            share_of_long=SHARE_OF_LONG,
        )
        load = Load(cluster, wanted, num_clients=NUM_CLIENTS, bound_s=BOUND_S)
        seconds = await strike(cluster, load, rng, happened, has_moved)
        print(summary(cluster, load.outcomes, happened, seconds))

        assert len(load.outcomes) >= NUM_REQUESTS
        assert not (wrong := wrong_outcomes(load.outcomes)), "\n".join(wrong)
        check_counted(cluster, num_before, load.outcomes)
        assert not (broken := errors_logged(cluster)), "\n".join(broken)
        assert not total(cluster, "tandem_block_mismatches_total")
        await asyncio.to_thread(wait_nothing_held, cluster, FREED_WITHIN_S)
        assert cluster.pids("router") == routers, "the router was not to be touched"
        assert set(cluster.processes().values()) == {1}, "a worker runs twice"
        assert migrations(cluster, "drain"), "no answer was migrated"
        assert migrations(cluster, "crash"), "no answer went on after a crash"
        assert kinds(happened) == KINDS


def kinds(happened: list[Happened]) -> set[str]:
    """The kinds of faults that occurred while requests were under way."""
    return {h.fault.kind for h in happened if h.num_requests}


async def known_prompts(cluster: KeptCluster, rng: Random) -> list[Prompt]:
    """Prompts with reference answers, and prompts that this cluster answered before any fault."""
    known = golden_prompts(rng, (0, 1, 2, 3, 4, 5, 6) * 4, answer_min=LONG_ANSWER - 16)
    known = await answered(cluster, known, FORM)
    lengths = (20, 33, 64, 120, 200, 310, 415, 520)
    return known + await computed_prompts(cluster, rng, lengths, answer=LONG_ANSWER)


async def strike(
    cluster: KeptCluster,
    load: Load,
    rng: Random,
    happened: list[Happened],
    has_moved: asyncio.Event,
) -> float:
    """Runs all requests and faults concurrently, until all workers are ready again. Returns the
    seconds.

    It also ends at the first wrong outcome.
    """
    started = time.monotonic()
    strikers = [
        kind(
            cluster, Random(rng.random()), num_requests=lambda: load.num_running, happened=happened
        ).run(deck, pause_s=pause_s)
        for kind, deck, pause_s in (
            (Crashes, CRASHES, CRASH_PAUSE_S),
            (Orders, ORDERS, ORDER_PAUSE_S),
        )
    ]
    watches = check(load, happened), watch_moves(cluster, has_moved)
    running = [asyncio.create_task(c) for c in (load.run(), *watches, *strikers)]
    # only the end of the load is expected
    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    seconds = time.monotonic() - started
    for task in running:
        task.cancel()
    for ended in await asyncio.gather(*running, return_exceptions=True):
        if isinstance(ended, Exception):
            raise ended
    await asyncio.to_thread(cluster.scale, prefill=2, decode=2)
    await asyncio.to_thread(
        wait_for, lambda: is_whole(cluster), deadline_s=180, what="the end of the last fault"
    )
    return seconds


def is_whole(cluster: KeptCluster) -> bool:
    """Returns whether all workers are ready and answer. The record of a worker that was just killed
    says for a while that it is ready, and then goes."""
    try:
        total(cluster, "tandem_block_mismatches_total")
    except (httpx.HTTPError, KeyError):
        return False
    return cluster.is_whole()


async def watch_moves(cluster: KeptCluster, has_moved: asyncio.Event) -> None:
    """Sets `has_moved` when answers have moved in both ways: a drain or a crash moves none if the
    worker has none at that moment. Then waits until it is cancelled."""
    while not has_moved.is_set():
        await asyncio.sleep(1)
        moves = [await asyncio.to_thread(migrations, cluster, r) for r in MIGRATION_REASONS]
        if all(moves):
            has_moved.set()
    await asyncio.Event().wait()


async def check(load: Load, happened: list[Happened]) -> None:
    """Prints the progress until it is cancelled. Raises AssertionError if a request ends
    wrongly."""
    started = time.monotonic()
    while True:
        await asyncio.sleep(10)
        wrong = wrong_outcomes(load.outcomes)
        assert not wrong, "\n".join([*wrong, *map(str, happened)])
        after_s = time.monotonic() - started
        print(
            f"{len(load.outcomes)} requests, {len(happened)} faults in {after_s:.0f} s", flush=True
        )

"""When a line of a batch may start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tandem.common.perf_model.rates import DecodeRate, WorkerRates
from tandem.common.worker_load import WorkerLoad
from tandem.router.batches.spare import (
    ITL_SHARE,
    QUEUE_S,
    UNPLACED_MAX,
    Requests,
    is_short,
    may_start,
)
from tandem.router.placement.costs import WorkerSnapshot

IDLE = WorkerLoad(num_running_slots=8, blocks_total=100)
# A sequence adds 1% to a step of 10 ms.
FLAT = WorkerRates(decode=DecodeRate(10e-3, 0.1e-3), measured=True)
LATER_S = 10.0


def worker(role: str, **load: Any) -> WorkerSnapshot:
    loaded = msgspec.structs.replace(IDLE, **load)
    return WorkerSnapshot(role, "e", "a", role, "ready", load=loaded, rates=FLAT)


def counts(
    num_lines: int, num_interactive: int, num_interactive_waiting: int, num_left: int = 0
) -> Requests:
    return Requests(
        num_lines=num_lines,
        num_left=num_left,
        num_interactive=num_interactive,
        num_interactive_waiting=num_interactive_waiting,
    )


def start(
    requests: Requests = Requests(), since_s: float = LATER_S, prefill_s: float = 0.0, **load: Any
) -> bool:
    workers = [worker("prefill", queued_s=prefill_s), worker("decode", **load)]
    return may_start(workers, requests, since_s=since_s)


def test_an_idle_cluster_takes_lines_at_once() -> None:
    assert start()
    assert start(Requests(num_lines=3), since_s=0.0, num_running=3)
    assert not may_start([], Requests(), since_s=LATER_S)
    assert not may_start([worker("prefill")], Requests(), since_s=LATER_S)
    draining = [worker("prefill"), replace(worker("decode"), state="draining")]
    assert not may_start(draining, Requests(), since_s=LATER_S)
    assert may_start([worker("decode")], Requests(), since_s=LATER_S)


@pytest.mark.parametrize(
    "requests",
    [Requests(num_interactive=1, num_interactive_waiting=1), Requests(num_lines_waiting=4)],
)
def test_lines_wait_for_requests_without_a_token(requests: Requests) -> None:
    assert not start(requests)


@pytest.mark.parametrize(
    "load",
    [
        {"num_waiting": 1},
        {"num_running": 7},
        {"num_running": 4, "num_pulls": 3},
        {"blocks_used": 90},
        {"prefill_s": 2 * QUEUE_S},
    ],
)
def test_lines_leave_room(load: dict[str, Any]) -> None:
    # All running sequences are lines, so only the room matters.
    assert not start(Requests(num_lines=load.get("num_running", 0) + 3), **load)


def test_own_lines_may_wait_at_a_worker() -> None:
    assert start(Requests(num_lines=2, num_lines_waiting=2), num_waiting=2)
    assert not start(Requests(num_lines=2, num_lines_waiting=2), num_waiting=3)
    assert not start(Requests(num_lines=4, num_lines_waiting=UNPLACED_MAX), num_waiting=4)


def test_interactive_requests_decode_hardly_slower() -> None:
    beside = [n for n in range(20) if start(counts(n, 1, 0), num_running=1)]
    # One sequence alone takes 10.1 ms for a step, and each further one 0.1 ms.
    assert beside == list(range(8))
    step_s = 10.1e-3
    assert len(beside) * 0.1e-3 <= ITL_SHARE * step_s
    assert not start(counts(0, 1, 0), since_s=5 * step_s, num_running=1)
    # The sequences of other routers count, too.
    assert not start(counts(8, 0, 0), num_running=9, num_running_slots=32)
    assert start(counts(8, 0, 0), num_running=8, num_running_slots=32)
    # But not the lines that have just ended.
    assert start(counts(8, 0, 0, num_left=1), since_s=0, num_running=9, num_running_slots=32)


def test_lines_stop_for_interactive_requests() -> None:
    workers = [worker("prefill"), worker("decode", num_running=8)]
    assert not is_short(workers, Requests(num_lines=8))
    assert not is_short(workers, counts(8, 1, 1))
    assert is_short(workers, counts(9, 1, 0))
    assert not is_short([], counts(9, 1, 0))

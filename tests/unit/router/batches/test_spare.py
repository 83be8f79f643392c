"""When a line of a batch may start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tandem.common.worker_load import WorkerLoad
from tandem.router.batches.spare import UNPLACED_MAX, OpenLines, is_short, may_start
from tandem.router.placement.costs import WorkerSnapshot

IDLE = WorkerLoad(num_running_slots=8, blocks_total=100)


def worker(role: str, **load: Any) -> WorkerSnapshot:
    loaded = msgspec.structs.replace(IDLE, **load)
    return WorkerSnapshot(role, "e", "a", role, "ready", load=loaded)


def start(lines: OpenLines = OpenLines(), **load: Any) -> bool:
    return may_start([worker("prefill"), worker("decode", **load)], lines)


def test_a_cluster_with_room_takes_lines_at_once() -> None:
    assert start()
    assert start(OpenLines(num_lines=3), num_running=5, num_lines=3)
    assert not may_start([], OpenLines())
    assert not may_start([worker("prefill")], OpenLines())
    draining = [worker("prefill"), replace(worker("decode"), state="draining")]
    assert not may_start(draining, OpenLines())
    assert may_start([worker("decode")], OpenLines())


@pytest.mark.parametrize(
    "load",
    [
        {"num_waiting": 1},
        {"num_running": 6},
        {"num_running": 4, "num_pulls": 2},
        {"blocks_used": 90},
    ],
)
def test_lines_leave_room(load: dict[str, Any]) -> None:
    assert not start(**load)
    num_running = load.get("num_running", 0)
    assert not start(OpenLines(num_lines=num_running), **load, num_lines=num_running)


def test_few_lines_wait_for_their_first_token() -> None:
    assert start(OpenLines(num_lines=2, num_lines_waiting=2), num_waiting=2)
    assert not start(OpenLines(num_lines=2, num_lines_waiting=2), num_waiting=3)
    assert not start(OpenLines(num_lines=4, num_lines_waiting=UNPLACED_MAX), num_waiting=4)


def test_lines_stop_while_too_few_slots_are_free() -> None:
    workers = [worker("prefill"), worker("decode", num_running=7, num_lines=5)]
    assert is_short(workers, OpenLines(num_lines=5))
    assert not is_short(workers, OpenLines())
    workers = [worker("prefill"), worker("decode", num_running=6, num_lines=5)]
    assert not is_short(workers, OpenLines(num_lines=5))
    assert not is_short([], OpenLines(num_lines=5))

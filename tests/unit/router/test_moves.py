from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tandem.common.perf_model.rates import DecodeRate, PrefillRate, WorkerRates
from tandem.router.placement.choose import Roster, Work, WorkerSnapshot, choose
from tandem.router.placement.moves import find_moves
from tests.unit.router.snapshots import decode_cost, snapshot, with_load

RATES = WorkerRates(PrefillRate(1e-3, 1e-5, 0.0), DecodeRate(1e-2, 1e-3), measured=True)


def decoding(name: str, running: int, waiting: int = 0, **more: object) -> WorkerSnapshot:
    values = {"num_running_slots": 8, "rates": RATES, **more}
    return snapshot(name, num_running=running, num_waiting=waiting, **values)


def test_a_queue_moves_to_a_worker_that_ran_out_of_work() -> None:
    full = decoding("a", 8, 21)
    idle = decoding("b", 0)
    assert find_moves([full, idle]) == {"a": 8}
    assert find_moves([full, decoding("b", 5, num_pulls=1)]) == {"a": 2}
    assert find_moves([decoding("a", 8, 3), idle]) == {"a": 3}
    assert find_moves([full, decoding("c", 8, 5), decoding("b", 0, num_running_slots=24)]) == {
        "a": 21,
        "c": 3,
    }


def test_nothing_moves_to_who_has_no_room() -> None:
    full = decoding("a", 8, 21)
    for other in (
        decoding("b", 0, 1),
        decoding("b", 8),
        decoding("b", 0, queued_s=0.2),
        replace(decoding("b", 0), state="draining"),
        replace(decoding("b", 0), reachable=False),
        replace(decoding("b", 0), role="prefill"),
        decoding("b", 0, num_running_slots=0),
    ):
        assert not find_moves([full, other])


loads = st.builds(decoding, st.just("?"), st.integers(0, 8), st.integers(0, 40))


@given(st.lists(loads, max_size=6))
def test_as_many_move_as_wait_and_find_a_slot(workers: list[WorkerSnapshot]) -> None:
    workers = [replace(w, worker_id=f"w{i}") for i, w in enumerate(workers)]
    moves = find_moves(workers)
    free = sum(8 - w.load.num_running for w in workers if not w.load.num_waiting)
    waiting = {w.worker_id: w.load.num_waiting for w in workers}
    assert sum(moves.values()) == min(free, sum(waiting.values()))
    assert all(0 < count <= waiting[name] for name, count in moves.items())


@given(st.integers(0, 8), st.integers(0, 40), st.integers(1, 40), st.integers(1, 500))
def test_a_waiting_request_costs_the_steps_until_a_slot_is_free(
    running: int, waiting: int, more: int, completion: int
) -> None:
    work = Work(100, completion_tokens=completion)
    few = decoding("a", running, waiting)
    many = decoding("a", running, waiting + more)
    few_s, many_s = (decode_cost(work, w, {}, producers=[]) for w in (few, many))
    num_later = max(0, running + waiting + more - 7) - max(0, running + waiting - 7)
    assert many_s - few_s >= num_later * completion * RATES.decode.step_s / 8 - 1e-9


def test_a_burst_is_split_by_slots() -> None:
    """64 requests on two workers with 8 slots: 32 each, or one more."""
    for seed in range(20):
        roster = Roster([decoding("a", 0), decoding("b", 0)])
        rng = Random(seed)
        for _ in range(64):
            placement = choose(Work(100, completion_tokens=96), roster, {}, rng)
            assert placement is not None
            worker = placement.decode
            roster.put(with_load(worker, num_waiting=worker.load.num_waiting + 1))
        assert abs(roster.by_id["a"].load.num_waiting - 32) <= 1

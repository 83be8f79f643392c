from __future__ import annotations

import math

import pytest

from tandem.common.perf_model.rates import DecodeRate, PrefillRate, WorkerRates
from tandem.router.admission.calibration import Calibration
from tandem.router.admission.capacity import (
    QUEUED_MAX_S,
    WAITING_MAX,
    has_capacity,
    queued_max_s,
    work_s,
)
from tandem.router.placement.costs import WorkerSnapshot
from tests.unit.router.snapshots import snapshot

RATES = WorkerRates(PrefillRate(0.1, 1e-3, 0.0), DecodeRate(0.01, 2e-3), 100, measured=True)


def worker(role: str = "decode", state: str = "ready", **load: int) -> WorkerSnapshot:
    return snapshot("w", role, state=state, rates=RATES, **load)


def room(*workers: WorkerSnapshot) -> bool:
    return has_capacity(workers, queued_max_s=1.0)


def test_a_short_queue_is_room() -> None:
    # 100 tokens take 0.2 s.
    assert room(worker(queued_tokens=500))
    assert not room(worker(queued_tokens=501))
    assert room(worker(queued_tokens=501), worker())
    assert not room(worker(queued_tokens=501), worker(state="draining"))


def test_where_there_are_prefill_workers_their_queue_counts() -> None:
    assert not room(worker(), worker("prefill", queued_tokens=501))
    assert room(worker(queued_tokens=501), worker("prefill", queued_tokens=500))
    assert room(worker(queued_tokens=0), worker("prefill", state="draining"))


def test_some_decode_worker_must_have_few_that_wait() -> None:
    full = worker(num_waiting=WAITING_MAX)
    assert not room(full, worker("prefill"))
    assert room(full, worker(num_waiting=WAITING_MAX - 1), worker("prefill"))
    # Of decode workers that prefill themselves, the same must have both.
    assert not room(full, worker(queued_tokens=501))


def test_a_running_slot_must_become_free_soon() -> None:
    full = worker(num_running=4, num_running_slots=4, num_waiting=3)

    def has_slot(completion_tokens: float) -> bool:
        return has_capacity([full], queued_max_s=1.0, completion_tokens=completion_tokens)

    # A step takes 18 ms, and every fourth of an answer a slot becomes free. Four wait for one.
    assert has_slot(50)
    assert not has_slot(60)


def test_a_prefill_queue_is_at_most_half_of_what_is_refused() -> None:
    calibration = Calibration(log_factor=math.log(2.0))
    assert queued_max_s(0.0, calibration) == QUEUED_MAX_S
    assert queued_max_s(4.0, calibration) == pytest.approx(4.0 * calibration.margin / 2 / 2)


def test_an_empty_pool_is_another_wait() -> None:
    assert room()
    assert room(worker("prefill", queued_tokens=10**6))


def test_work_is_the_prompt_and_the_likely_completion() -> None:
    assert work_s([worker()], 1000, 10) == pytest.approx(2.0 + 10 * 2e-3)
    assert work_s([], 0, 1) > 0

from __future__ import annotations

import pytest

from tandem.common.perf_model.rates import DecodeRate, PrefillRate, WorkerRates
from tandem.router.admission.capacity import (
    COMPLETION_TOKENS_LIKELY,
    WAITING_MAX,
    has_capacity,
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


def test_an_empty_pool_is_another_wait() -> None:
    assert room()
    assert room(worker("prefill", queued_tokens=10**6))


def test_work_is_the_prompt_and_the_likely_completion() -> None:
    assert work_s([worker()], 1000, 10) == pytest.approx(2.0 + 10 * 2e-3)
    likely = COMPLETION_TOKENS_LIKELY * 2e-3
    assert work_s([worker()], 1000, 10**6) == pytest.approx(2.0 + likely)
    assert work_s([], 0, 1) > 0

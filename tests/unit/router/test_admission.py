from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.common.perf_model.predict import prefill_seconds, queue_seconds
from tandem.common.perf_model.rates import DecodeRate, PrefillRate, WorkerRates
from tandem.common.worker_load import GroupLoad
from tandem.router.admission.admit import AdmissionDecision, admit
from tandem.router.admission.calibration import Calibration, Promise
from tandem.router.admission.predict import (
    MARGIN,
    TtftLimit,
    allowed_s,
    expected_ttft_s,
    slot_wait_s,
)
from tandem.router.placement.choose import Placement, Work, WorkerSnapshot, choose
from tests.unit.router.snapshots import snapshot, with_load

RATES = WorkerRates(PrefillRate(0.1, 1e-3, 0.0), DecodeRate(0.01, 2e-3), 100, measured=True)


def placed(
    work: Work, depth: int = 0, *, rates: WorkerRates = RATES, role: str = "decode", **load: int
) -> Placement:
    workers = [
        snapshot("p", role, rates=rates, **load),
        snapshot("d", rates=rates, num_running=3),
    ]
    here = workers[:1] if role == "decode" else workers
    placement = choose(work, here, {"p": depth}, Random(0))
    assert placement is not None
    return placement


def decide(
    work: Work,
    placement: Placement,
    limit: TtftLimit,
    *,
    calibration: Calibration = Calibration(),
    ahead_s: float = 0.0,
) -> AdmissionDecision:
    return admit(
        work, placement, limit, calibration, ahead_s=ahead_s, completion_tokens=0.0, now=7.0
    )


def wait_s(work: Work, placement: Placement, limit: TtftLimit) -> float | None:
    decision = decide(work, placement, limit)
    return None if decision.is_admitted else decision.late_s


def test_predicts_queue_prompt_and_the_steps_of_those_who_decode() -> None:
    placement = placed(Work(320, 16), 10, queued_tokens=240, num_running=5)
    queue_s = 3 * 0.1 + 0.24
    prompt_s = 2 * 0.1 + 0.16
    expected_s = queue_s + prompt_s + (240 + 160) / 100 * 5 * 2e-3
    assert expected_ttft_s(Work(320, 16), placement) == pytest.approx(expected_s)


def test_counts_the_fastest_of_candidates_and_the_decode_worker_itself() -> None:
    alone_s = 4 * 0.1 + 0.32
    placement = placed(Work(320), role="prefill")
    assert placement.prefill_candidates[0].worker_id == "p"
    assert expected_ttft_s(Work(320), placement) == pytest.approx(alone_s)
    placement = placed(Work(320), role="prefill", queued_tokens=100_000)
    here_s = alone_s + 3.2 * 3 * 2e-3
    assert expected_ttft_s(Work(320), placement) == pytest.approx(here_s)


def test_without_rates_a_token_has_the_price_of_the_guess() -> None:
    placement = placed(Work(100), rates=WorkerRates(), queued_tokens=300)
    guessed_s = queue_seconds(WorkerRates(), 300) + prefill_seconds(WorkerRates(), 100, 0)
    assert expected_ttft_s(Work(100), placement) == pytest.approx(guessed_s)


@given(st.integers(0, 100_000), st.integers(0, 100_000), st.integers(1, 50_000))
def test_more_in_the_queue_is_never_admitted_sooner(few: int, more: int, num_tokens: int) -> None:
    limit = TtftLimit(2.0, 2e-4)
    work = Work(num_tokens)
    short, long = (
        wait_s(work, placed(work, queued_tokens=queued), limit) or 0.0
        for queued in (few, few + more)
    )
    assert short <= long


def test_says_how_long_to_wait() -> None:
    work = Work(100)
    limit = TtftLimit(1.0, 1e-3)
    placement = placed(work, queued_tokens=1000)
    late_s = expected_ttft_s(work, placement) - MARGIN * 1.1
    assert wait_s(work, placement, limit) == pytest.approx(late_s)
    assert wait_s(work, placed(work), limit) is None


def test_what_was_learned_and_the_wait_in_the_router_count() -> None:
    """The prompt is expected in 0.75 s, of a limit of 2 s."""
    work = Work(200)
    limit = TtftLimit(2.0)
    placement = placed(work, queued_tokens=150)
    predicted_s = expected_ttft_s(work, placement)
    assert decide(work, placement, limit).promise == Promise(predicted_s, 7.0)
    held = decide(work, placement, limit, ahead_s=1.0)
    assert held.late_s == pytest.approx(predicted_s + 1.0 - MARGIN * 2.0)
    assert held.promise is None
    slow = Calibration(log_factor=math.log(3.0))
    assert decide(work, placement, limit, calibration=slow).late_s == pytest.approx(
        3 * predicted_s - MARGIN * 2.0
    )
    assert decide(work, placed(work), TtftLimit(100.0)) == AdmissionDecision(
        0.0, None, 100.0
    )  # as it teaches nothing


def test_nobody_is_refused_for_a_guess() -> None:
    guessed = placed(Work(100), rates=WorkerRates(), queued_tokens=10**9)
    assert wait_s(Work(100), guessed, TtftLimit(1.0)) is None


def test_a_long_prompt_is_taken_while_it_waits_no_longer_than_it_takes() -> None:
    """A strict limit would refuse it for ever: it takes longer than the limit when all is idle."""
    work = Work(10_000)
    strict = TtftLimit(1.0)
    kind = TtftLimit(1.0, own_times=2.0)
    own_s = expected_ttft_s(work, placed(work))
    assert own_s > 10
    assert wait_s(work, placed(work), strict) is not None
    assert wait_s(work, placed(work), kind) is None
    waits = placed(work, queued_tokens=4000)
    assert expected_ttft_s(work, waits) - allowed_s(work, waits, kind) == pytest.approx(8.0 - own_s)
    assert wait_s(work, waits, kind) is None
    assert wait_s(work, placed(work, queued_tokens=20_000), kind) is not None


def test_a_long_prompt_is_taken_where_the_decode_worker_has_not_measured_itself() -> None:
    """It is likely to be like the other: 10 s, and 0.1 s for each of 20 steps of 512 tokens."""
    work = Work(10_000)
    kind = TtftLimit(1.0, own_times=2.0)
    workers = [
        snapshot("p", "prefill", rates=RATES),
        snapshot("d"),
    ]
    placement = choose(work, workers, {}, Random(0))
    assert placement is not None
    assert allowed_s(work, placement, kind) == pytest.approx(2 * 12.0)
    assert allowed_s(work, placement, kind, slower=3.0) == pytest.approx(3 * 2 * 12.0)
    assert wait_s(work, placement, kind) is None


def decoding(**load: object) -> WorkerSnapshot:
    return snapshot("d", rates=RATES, **load)


def test_waits_for_a_running_slot_while_others_end() -> None:
    """One of 10 requests of 100 tokens ends each 0.3 s where a step with 10 running slots takes 30
    ms."""
    work = Work(100)
    assert slot_wait_s(work, decoding(num_running=9, num_running_slots=10), 100) == 0.0
    assert slot_wait_s(work, decoding(num_running=50), 100) == 0.0  # it does not say
    # Nobody ended yet.
    assert slot_wait_s(work, decoding(num_running=99, num_running_slots=10), 0) == 0.0
    full = decoding(num_running=8, num_pulls=2, num_running_slots=10)
    assert slot_wait_s(work, full, 100) == pytest.approx(0.3)
    queue = decoding(num_running=10, num_waiting=4, num_running_slots=10)
    assert slot_wait_s(work, queue, 100) == pytest.approx(1.5)


def test_waits_for_blocks_while_others_end() -> None:
    free = decoding(num_running=10, num_running_slots=64, blocks_total=100, blocks_used=90)
    assert slot_wait_s(Work(160), free, 100) == 0.0
    assert slot_wait_s(Work(161), free, 100) == pytest.approx(0.3)
    queue = decoding(
        num_running=10, num_waiting=2, queued_tokens=50, blocks_total=100, blocks_used=90
    )
    assert slot_wait_s(Work(111), queue, 100) == pytest.approx(0.9)
    prompts = with_load(queue, num_waiting=0)  # which have their blocks
    assert slot_wait_s(Work(111), prompts, 100) == 0.0


def test_waits_for_blocks_of_the_pool_that_lacks_them() -> None:
    groups = (GroupLoad(100, 90), GroupLoad(50, 0, 4))
    free = decoding(num_running=10, blocks_total=150, blocks_used=90, groups=groups)
    assert slot_wait_s(Work(160), free, 100) == 0.0
    assert slot_wait_s(Work(161), free, 100) == pytest.approx(0.3)
    window = with_load(free, groups=(GroupLoad(100, 0), GroupLoad(50, 45, 4)))
    assert slot_wait_s(Work(900), window, 100) == 0.0
    queue = with_load(window, num_waiting=1, queued_tokens=100)
    assert slot_wait_s(Work(900), queue, 100) == pytest.approx(0.6)


def test_the_queue_where_it_is_prefilled_shortens_while_it_waits_for_a_running_slot() -> None:
    work = Work(100)
    alone_s = 0.2
    full = decoding(num_running=10, num_waiting=4, num_running_slots=10)
    for queued, wait in ((500, 1.5), (1500, 3.0)):
        peer = snapshot("p", "prefill", rates=RATES, queued_tokens=queued)
        placement = Placement(full, (peer,), (), 100, 100)
        ttft_s = expected_ttft_s(work, placement, completion_tokens=100)
        assert ttft_s == pytest.approx(wait + alone_s)


def test_a_busy_decode_worker_is_not_believed_to_prefill_itself() -> None:
    """The worker itself chooses so, because its prefill would delay all sequences that decode
    there."""
    work = Work(1000)  # 2 s
    for running, ttft_s in ((0, 2.0), (1, 2.0 + 10 * 2e-3), (2, 3.0 + 2.0)):
        decode = decoding(num_running=running)
        peer = snapshot("p", "prefill", rates=RATES, queued_tokens=1500)
        placement = Placement(decode, (peer,), (), 1000, 1000)
        assert expected_ttft_s(work, placement) == pytest.approx(ttft_s)


def test_a_decode_worker_that_never_prefilled_counts_as_one_like_the_others() -> None:
    decode = snapshot("d", num_running=5)
    peer = snapshot("p", "prefill", rates=RATES, queued_tokens=1000)
    placement = Placement(decode, (peer,), (), 500, 500)
    assert expected_ttft_s(Work(500), placement) == pytest.approx(2.0 + 1.0)


def test_prefill_beside_many_who_decode_comes_in_small_chunks() -> None:
    """20 tokens a step: 100 ms for the step, 20 for the tokens, 20 for ten who decode."""
    decode = decoding(num_running=10, chunk_tokens=20, queued_tokens=40)
    placement = Placement(decode, (), (), 60, 60)
    assert expected_ttft_s(Work(60), placement) == pytest.approx((2 + 3) * 0.14)

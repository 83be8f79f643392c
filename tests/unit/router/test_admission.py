from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cost_model import DecodeRate, PrefillRate, WorkerRates
from services.router.admission.predict import MARGIN, TtftLimit, expected_ttft_s, wait_s
from services.router.placement.choose import Placement, Work, WorkerSnapshot, choose
from services.router.placement.costs import TOKEN_S

RATES = WorkerRates(PrefillRate(0.1, 1e-3, 0.0), DecodeRate(0.01, 2e-3), 100, measured=True)


def placed(
    work: Work, depth: int = 0, *, rates: WorkerRates = RATES, role: str = "decode", **load: int
) -> Placement:
    workers = [
        WorkerSnapshot("p", "p/1", "", role, "ready", rates=rates, **load),  # type: ignore[arg-type]
        WorkerSnapshot("d", "d/1", "", "decode", "ready", rates=rates, num_running=3),
    ]
    here = workers[:1] if role == "decode" else workers
    placement = choose(work, here, {"p": depth}, Random(0))
    assert placement is not None
    return placement


def test_predicts_queue_prompt_and_the_steps_of_those_who_decode() -> None:
    placement = placed(Work(320, 16), 10, queued_tokens=240, num_running=5)
    queue_s, prompt_s = 3 * 0.1 + 0.24, 2 * 0.1 + 0.16
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


def test_without_rates_a_token_has_one_price() -> None:
    placement = placed(Work(100), rates=WorkerRates(), queued_tokens=300)
    assert expected_ttft_s(Work(100), placement) == pytest.approx(400 * TOKEN_S)


@given(st.integers(0, 100_000), st.integers(0, 100_000), st.integers(1, 50_000))
def test_more_in_the_queue_is_never_admitted_sooner(few: int, more: int, num_tokens: int) -> None:
    limit, work = TtftLimit(2.0, 2e-4), Work(num_tokens)
    short, long = (
        wait_s(work, placed(work, queued_tokens=queued), limit) or 0.0
        for queued in (few, few + more)
    )
    assert short <= long


def test_says_how_long_to_wait() -> None:
    work, limit = Work(100), TtftLimit(1.0, 1e-3)
    placement = placed(work, queued_tokens=1000)
    late_s = expected_ttft_s(work, placement) - MARGIN * 1.1
    assert wait_s(work, placement, limit) == pytest.approx(late_s)
    assert wait_s(work, placed(work), limit) is None


def test_what_is_ahead_in_the_router_counts() -> None:
    work, limit = Work(100), TtftLimit(1.0)
    idle = placed(work)
    assert wait_s(work, idle, limit, ahead_s=1.0) == pytest.approx(
        1.0 + expected_ttft_s(work, idle) - MARGIN
    )


def test_nobody_is_refused_for_a_guess() -> None:
    guessed = placed(Work(100), rates=WorkerRates(), queued_tokens=10**9)
    assert wait_s(Work(100), guessed, TtftLimit(1.0)) is None


def test_a_long_prompt_is_taken_while_it_waits_no_longer_than_it_takes() -> None:
    """A strict limit would refuse it for ever: it takes longer than the limit when all is idle."""
    work, strict, kind = Work(10_000), TtftLimit(1.0), TtftLimit(1.0, own_times=2.0)
    own_s = expected_ttft_s(work, placed(work))
    assert own_s > 10
    assert wait_s(work, placed(work), strict) is not None
    assert wait_s(work, placed(work), kind) is None
    assert wait_s(work, placed(work), kind, ahead_s=own_s - 0.1) is None
    assert wait_s(work, placed(work), kind, ahead_s=own_s + 0.1) == pytest.approx(0.1)

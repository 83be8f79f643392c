"""The size that each signal leads to, and the reason that is given."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.common.config.autoscale import AutoscaleConfig
from tandem.common.perf_model.rates import DecodeRate
from tandem.router.autoscaler.demand import (
    NO_COUNTS,
    DemandMeter,
    Observation,
    PoolSeen,
    quantile,
)
from tandem.router.autoscaler.policy import Autoscaler, ScalingDecision, decode_tokens_per_s

CONFIG = AutoscaleConfig(load_quantile=0.9, utilization=0.8, cold_start_s=90, interval_s=10)
RATE = DecodeRate(step_s=0.01, sequence_s=0.002)
IDLE = PoolSeen(wanted=1, num_ready=1)


class Day:
    """Turns of the policy; `turn` says what came in the last interval."""

    def __init__(self, config: AutoscaleConfig = CONFIG) -> None:
        self.config = config
        self.policy = Autoscaler(config, 0.0)
        self.meter = DemandMeter()
        self.now_s = 0.0
        self.sizes = {"prefill": config.prefill_min, "decode": config.decode_min}

    def turn(
        self,
        *,
        requests: int = 0,
        prefill_s: float = 0.0,
        ttft: float = 0.2,
        itl: float = 0.2,
        prefill: PoolSeen | None = None,
        decode: PoolSeen | None = None,
        num_held: int = 0,
    ) -> tuple[ScalingDecision, ScalingDecision]:
        for _ in range(requests):
            self.meter.new_request(prefill_s)
            self.meter.first_token(ttft)
            self.meter.next_tokens(itl, 99)
            self.meter.ended(100)
        sizes = self.sizes
        decisions = self.policy.decide(
            Observation(
                self.now_s,
                self.meter.demand(),
                prefill or PoolSeen(sizes["prefill"], sizes["prefill"]),
                decode or PoolSeen(sizes["decode"], sizes["decode"]),
                RATE,
                num_held,
            )
        )
        for decision in decisions:
            sizes[decision.role] = decision.to
        self.now_s += self.config.interval_s
        return decisions


def test_before_anything_was_seen_sizes_stay() -> None:
    day = Day()
    prefill, decode = day.turn(prefill=PoolSeen(3, 3), decode=PoolSeen(2, 2))

    assert (prefill.to, decode.to) == (3, 2)
    assert prefill.why == "start"


def test_each_pool_gets_what_its_own_load_needs() -> None:
    day = Day()
    for _ in range(20):
        # 2 a second with 1.5 s of prefill: 3 workers' time at 0.8; 200 tokens/s of 450 and 0.8.
        prefill, decode = day.turn(requests=20, prefill_s=1.5)

    assert decode_tokens_per_s(RATE, 0.1) == pytest.approx(450)
    assert (prefill.to, prefill.why) == (4, "load")
    assert (decode.to, decode.why) == (1, "load")


def test_a_rising_load_is_met_a_cold_start_ahead() -> None:
    day = Day()
    for number in range(30):
        prefill, _ = day.turn(requests=10, prefill_s=0.1 * number)

    assert prefill.to * CONFIG.utilization > 0.1 * 29 + 0.01 * 90


def test_a_missed_first_token_adds_to_the_pool_where_it_waits() -> None:
    day = Day()
    for _ in range(5):
        day.turn(requests=1, prefill_s=0.1)
    prefill, decode = day.turn(requests=20, prefill_s=0.01, ttft=3.0)
    assert (prefill.to, prefill.why, decode.why) == (2, "ttft", "step")

    day = Day()
    for _ in range(5):
        day.turn(requests=1, prefill_s=0.1)
    waits = PoolSeen(1, 1, num_waiting=9)
    prefill, decode = day.turn(requests=20, prefill_s=0.01, ttft=3.0, decode=waits)
    assert (prefill.to, decode.why) == (1, "ttft")


def test_those_that_still_start_are_not_asked_for_again() -> None:
    day = Day()
    for _ in range(5):
        day.turn(requests=10, prefill_s=0.1)
    for _ in range(6):
        prefill, _ = day.turn(requests=50, prefill_s=0.01, ttft=3.0, prefill=PoolSeen(2, 1))

    assert prefill.to == 2


def test_slow_tokens_and_full_memory_add_decode_workers() -> None:
    day = Day()
    day.turn(requests=10)
    _, decode = day.turn(requests=50, itl=1.3)
    assert (decode.to, decode.why) == (2, "itl")

    day = Day()
    day.turn(requests=10)
    _, decode = day.turn(requests=10, decode=PoolSeen(2, 2, kv_use=0.95))
    assert (decode.to, decode.why) == (3, "kv")


def test_a_queue_that_will_outlast_the_cold_start_adds_prefill_workers() -> None:
    day = Day()
    day.turn(requests=1, prefill_s=0.1)
    prefill, _ = day.turn(requests=1, prefill_s=0.1, prefill=PoolSeen(1, 1, queued_s=50.0))
    assert prefill.to == 1, "it is gone before a new worker comes"

    prefill, _ = day.turn(requests=1, prefill_s=0.1, prefill=PoolSeen(1, 1, queued_s=300.0))
    assert (prefill.to, prefill.why) == (4, "queue")


def test_an_empty_pool_is_woken_by_who_waits_and_sleeps_again() -> None:
    config = AutoscaleConfig(prefill_min=0, decode_min=0)
    day = Day(config)
    for _ in range(3):
        day.turn()
    prefill, decode = day.turn(requests=1, prefill_s=0.5, num_held=1)
    assert (prefill.to, decode.to) == (1, 1)

    for _ in range(150):
        prefill, decode = day.turn()
    assert (prefill.to, decode.to) == (0, 0)


def test_without_a_prefill_pool_decode_workers_carry_both() -> None:
    day = Day(AutoscaleConfig(prefill_min=0, prefill_max=0, utilization=0.8))
    for _ in range(20):
        prefill, decode = day.turn(requests=20, prefill_s=1.0)

    assert prefill.to == 0
    assert decode.to == 4  # 2 of prefill and 0.44 of decode, at 0.8


def test_a_ten_fold_step_is_met_at_the_next_decision_and_in_full() -> None:
    day = Day()
    for _ in range(60):
        day.turn(requests=4, prefill_s=0.9)
    prefill, decode = day.turn(requests=40, prefill_s=0.9)
    assert (prefill.to, prefill.why) == (5, "step")  # 3.6 workers' time at 0.8
    assert decode.to == 2  # 400 tokens/s of 450, at 0.8


def test_a_step_is_met_though_the_pool_has_just_shrunk() -> None:
    day = Day()
    for requests in (30, *[8] * 75):  # up, then down: it turned
        prefill, _ = day.turn(requests=requests, prefill_s=0.9)
    assert prefill.to < 4
    shrunk = prefill.to

    prefill, _ = day.turn(requests=80, prefill_s=0.9)
    assert (prefill.to, prefill.why) == (8, "bounds")
    assert shrunk < 8


def test_pools_without_any_request_get_their_smallest_size_at_once() -> None:
    day = Day()
    for _ in range(5):
        day.turn(requests=40, prefill_s=0.9)
    running = PoolSeen(2, 2, num_running=1)
    for _ in range(10):
        prefill, decode = day.turn(decode=running)
    assert (prefill.to, decode.to) == (5, 2), "somebody still reads an answer"

    for _ in range(4):
        prefill, decode = day.turn()
    assert (prefill.to, decode.to, prefill.why) == (1, 1, "idle")
    assert prefill.line == "prefill 5 -> 1: no request for 40 s"

    prefill, decode = day.turn(requests=40, prefill_s=0.9)
    assert (prefill.to, decode.to) == (5, 2), "what comes back finds no old history"


def test_a_pause_of_sparse_requests_is_not_idleness() -> None:
    day = Day()
    for number in range(60):  # one in 80 s
        prefill, _ = day.turn(requests=number % 8 == 1, prefill_s=9.0)
        assert prefill.why != "idle"


def test_without_a_time_of_idleness_pools_shrink_slowly() -> None:
    day = Day(AutoscaleConfig(utilization=0.8, idle_s=0.0))
    for _ in range(5):
        day.turn(requests=40, prefill_s=0.9)
    for _ in range(50):
        prefill, _ = day.turn()

    assert prefill.to == 5


def test_a_decision_explains_itself_in_one_line() -> None:
    day = Day()
    for _ in range(3):
        prefill, _ = day.turn(requests=20, prefill_s=1.5)

    assert "\n" not in prefill.line
    assert prefill.line.startswith(
        "prefill 4 -> 4 because of load: 4 wanted, 1 to 8 allowed; load now 3.00"
    )
    assert "ttft p95 0.2" in prefill.line


def test_a_router_that_started_anew_does_not_count_backwards() -> None:
    day = Day()
    for _ in range(5):
        day.turn(requests=20, prefill_s=1.0)
    day.meter = DemandMeter()
    prefill, decode = day.turn(requests=20, prefill_s=1.0)

    assert prefill.wanted >= 3
    assert decode.wanted >= 1


TURN = st.tuples(st.integers(0, 60), st.floats(0, 3), st.floats(0, 9), st.floats(0, 9))


@settings(max_examples=40, deadline=None)
@given(st.lists(TURN, min_size=5, max_size=200))
def test_whatever_comes_sizes_keep_bounds_and_turn_once_in_ten_minutes(turns: list) -> None:  # type: ignore[type-arg]
    day = Day()
    decisions: dict[str, list[ScalingDecision]] = {"prefill": [], "decode": []}
    for requests, prefill_s, ttft, itl in turns:
        for decision in day.turn(requests=requests, prefill_s=prefill_s, ttft=ttft, itl=itl):
            assert 1 <= decision.to <= 8
            decisions[decision.role].append(decision)
    for made in decisions.values():
        turned_s = -CONFIG.reversal_s
        direction = 0
        for number, decision in enumerate(made):
            now = (decision.to > decision.size) - (decision.to < decision.size)
            if decision.why == "idle":
                direction = 0
            elif now and direction and now != direction:
                now_s = number * CONFIG.interval_s
                # Only a step of the load is not waited for.
                assert now_s - turned_s >= CONFIG.reversal_s or (now, decision.why) == (1, "step")
                turned_s = now_s
            if decision.why != "idle":
                direction = now or direction


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.floats(0, 3)), min_size=2, max_size=60))
def test_more_load_never_wants_fewer_workers(turns: list[tuple[int, float]]) -> None:
    light = Day()
    heavy = Day()
    # A step, which only one of them might make, changes the forecast.
    with patch("tandem.router.autoscaler.policy.step_start", return_value=None):
        for requests, prefill_s in turns:
            less = light.turn(requests=requests, prefill_s=prefill_s)
            more = heavy.turn(requests=2 * requests, prefill_s=prefill_s)
            assert all(m.wanted >= w.wanted for w, m in zip(less, more, strict=True))


def test_a_quantile_of_buckets_is_an_upper_edge() -> None:
    meter = DemandMeter()
    for share in (0.05, 0.15, 0.15, 0.95, 3.0, 20.0):
        meter.first_token(share)
    counts = meter.demand().ttft

    assert quantile(counts, 0.5) == 0.2
    assert quantile(counts, 0.8) == 4.0
    assert quantile(counts, 1.0) == 16.0
    assert quantile(NO_COUNTS, 0.9) == 0.0

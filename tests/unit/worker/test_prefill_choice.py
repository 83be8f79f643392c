from __future__ import annotations

from dataclasses import replace
from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from tandem.common.perf_model.predict import Holder
from tandem.common.perf_model.rates import PairRate, PrefillRate, WorkerRates
from tandem.common.perf_model.soonest import Prompt as Missing
from tandem.common.perf_model.soonest import produced_s
from tandem.worker.decode.prefill_choice import (
    Candidate,
    LocalWorker,
    PrefillPrompt,
    candidate_seconds,
    local_seconds,
    plan_prefill,
    soonest_producer,
)

BLOCK_BYTES = 16 * 23_040  # SmolLM2, bfloat16
CORE = WorkerRates(PrefillRate(5e-3, 1e-3, 2e-7), block_bytes=BLOCK_BYTES)
LAN = PairRate("nixl", 1e-3, 1e9)
WAN = PairRate("grpc", 40e-3, 2e6)


def prompt(num_tokens: int) -> PrefillPrompt:
    return PrefillPrompt(num_tokens, 16)


def candidate(worker_id: str = "p0", **more: object) -> Candidate:
    values: dict[str, object] = {"rates": CORE, "worker_id": worker_id, "pair": LAN, **more}
    return Candidate(**values)  # type: ignore[arg-type]


small = st.floats(1e-6, 0.05)
rates = st.builds(
    WorkerRates,
    st.builds(PrefillRate, small, st.floats(1e-6, 5e-3), st.floats(0, 1e-6)),
    step_tokens=st.sampled_from([64, 512]),
    block_bytes=st.just(BLOCK_BYTES),
)
pairs = st.builds(PairRate, st.just("nixl"), small, st.floats(1e5, 1e10))
counts = st.integers(0, 20_000)
lengths = st.integers(1, 8000)
heres = st.builds(
    LocalWorker,
    rates,
    counts,
    st.just(0),
    st.lists(st.builds(Holder, st.integers(0, 8000), pairs), max_size=2).map(tuple),
    st.integers(0, 30),
)
candidate_lists = st.lists(
    st.builds(candidate, rates=rates, pair=pairs, queue_s=st.floats(0, 100), wait_s=small),
    min_size=1,
    max_size=4,
).map(lambda cs: [replace(c, worker_id=f"p{i}") for i, c in enumerate(cs)])


@given(lengths, heres, candidate_lists)
def test_the_choice_is_close_to_the_best_of_all(
    num_tokens: int, here: LocalWorker, candidates: list[Candidate]
) -> None:
    asked = prompt(num_tokens)
    at = {c.worker_id: candidate_seconds(asked, c, num_tokens) for c in candidates}
    best_s = min(local_seconds(asked, here), *at.values())
    plan = plan_prefill(asked, here, candidates)
    expected_s = at[plan.candidates[0]] if plan.candidates else local_seconds(asked, here)
    assert plan.seconds == expected_s
    assert expected_s <= best_s * 1.1 / 0.9 + 1e-9


@given(lengths, heres, candidate_lists)
def test_nobody_is_asked_twice_or_when_prefill_here_is_clearly_faster(
    num_tokens: int, here: LocalWorker, candidates: list[Candidate]
) -> None:
    asked = prompt(num_tokens)
    plan = plan_prefill(asked, here, candidates)
    assert len(set(plan.candidates)) == len(plan.candidates)
    here_s = local_seconds(asked, here)
    at = {c.worker_id: candidate_seconds(asked, c, num_tokens) for c in candidates}
    assert all(0.9 * at[w] <= here_s for w in plan.candidates)


@given(lengths, heres, candidate_lists, st.integers(1, 50))
def test_more_running_never_turns_to_prefill_here(
    num_tokens: int, here: LocalWorker, candidates: list[Candidate], more: int
) -> None:
    busier = replace(here, num_running=here.num_running + more)
    if plan_prefill(prompt(num_tokens), here, candidates).candidates:
        assert plan_prefill(prompt(num_tokens), busier, candidates).candidates


def test_the_regret_over_a_grid_is_small_against_brute_force() -> None:
    """Truth is 20% off the rates at random; the better of both is what it turned out to be."""
    regrets = []
    for number, num_tokens in enumerate(range(100, 6100, 200)):
        for pair in (LAN, WAN, PairRate("grpc", 2e-3, 1e8)):
            off = 0.8 + 0.4 * ((number * 7) % 10) / 9
            true = replace(candidate(pair=pair), pair=PairRate("", 2e-3, off * pair.bytes_per_s))
            at_s = candidate_seconds(prompt(num_tokens), true, num_tokens)
            here_s = local_seconds(prompt(num_tokens), LocalWorker(CORE))
            plan = plan_prefill(prompt(num_tokens), LocalWorker(CORE), [candidate(pair=pair)])
            took_s = at_s if plan.candidates else here_s
            regrets.append(took_s / min(at_s, here_s) - 1)
    assert median(regrets) <= 0.1
    assert max(regrets) <= 0.4


def test_an_idle_cluster_disaggregates_and_a_slow_network_does_not() -> None:
    assert plan_prefill(prompt(2048), LocalWorker(CORE), [candidate()]).candidates == ("p0",)
    plan = plan_prefill(prompt(2048), LocalWorker(CORE), [candidate(pair=WAN)])
    assert plan.candidates == ()
    assert "2048 tokens missing" in plan.reason
    assert 0 < plan.local_s == plan.seconds < plan.remote_s


def test_the_plan_has_the_costs_that_were_compared() -> None:
    plan = plan_prefill(prompt(2048), LocalWorker(CORE, num_running=3), [candidate()])
    assert 0 < plan.remote_s == plan.seconds < plan.local_s
    plan = plan_prefill(prompt(2048), LocalWorker(CORE), [])
    assert (plan.local_s, plan.remote_s) == (0, 0), "nothing was compared"


def test_those_who_decode_here_count() -> None:
    slow = candidate(pair=PairRate("grpc", 40e-3, 1e7))
    assert plan_prefill(prompt(1000), LocalWorker(CORE), [slow]).candidates == ()
    busy = LocalWorker(CORE, num_running=3)
    assert plan_prefill(prompt(1000), busy, [slow]).candidates == ("p0",)


def test_the_wait_that_a_candidate_named_counts() -> None:
    full = candidate("p0", wait_s=10.0)
    free = candidate("p1", queue_s=0.02)
    assert plan_prefill(prompt(1000), LocalWorker(CORE), [full, free]).candidates == ("p1",)
    assert plan_prefill(prompt(1000), LocalWorker(CORE), [full]).candidates == ()
    busy = LocalWorker(CORE, queue_s=100.0)
    assert plan_prefill(prompt(1000), busy, [full, free]).candidates == ("p1", "p0")


def test_among_equals_the_routers_first_stays_first() -> None:
    first = candidate("p1", queue_s=0.03)
    second = candidate("p0")
    assert plan_prefill(prompt(1000), LocalWorker(CORE), [first, second]).candidates == ("p1", "p0")
    loaded = candidate("p1", queue_s=0.9)
    assert plan_prefill(prompt(1000), LocalWorker(CORE), [loaded, second]).candidates[0] == "p0"


def test_a_candidate_that_can_pull_the_prefix_is_as_good_as_one_that_has_it() -> None:
    asked = prompt(4100)
    alone = candidate("p0")
    near = candidate("p1", holders=(Holder(4000, LAN),))
    plan = plan_prefill(asked, LocalWorker(CORE), [alone, near])
    assert plan.candidates[0] == "p1"
    assert plan.seconds < 0.1 * candidate_seconds(asked, alone, 4100)


def test_the_time_to_load_from_a_tier_is_counted_at_its_worker() -> None:
    plain, loads = (candidate(cached_tokens=3840, load_s=load_s) for load_s in (0.0, 0.25))
    later_s = candidate_seconds(prompt(4000), loads, 100) - candidate_seconds(
        prompt(4000), plain, 100
    )
    assert abs(later_s - 0.25) < 1e-9


@given(st.integers(32, 8000), candidate_lists, st.floats(0, 1))
def test_a_producer_takes_as_long_as_the_candidate(
    num_tokens: int, candidates: list[Candidate], load_s: float
) -> None:
    """The engine's comparison with its tiers, and the choice after it, expect the same."""
    cached = [replace(c, cached_tokens=32, load_s=load_s) for c in candidates]
    asked = prompt(num_tokens)
    nothing = Missing(num_tokens, 16, 0, CORE.prefill, 512)
    producer = soonest_producer(asked, cached)
    assert producer is not None
    expected_s = min(candidate_seconds(asked, c, num_tokens) for c in cached)
    assert abs(produced_s(nothing, producer, 0) - expected_s) <= 1e-6 * expected_s


def test_nobody_produces_without_candidates() -> None:
    assert soonest_producer(prompt(100), []) is None

from __future__ import annotations

from dataclasses import replace
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.common.perf_model.predict import prefill_seconds, queue_seconds, token_seconds
from tandem.common.perf_model.rates import (
    DecodeRate,
    PairRate,
    PrefillRate,
    WindowBytes,
    WorkerRates,
)
from tandem.common.worker_load import GroupLoad
from tandem.router.placement.choose import (
    PREFILL_CANDIDATES_MAX,
    Work,
    WorkerSnapshot,
    choose,
    near_best,
)
from tandem.router.placement.costs import (
    PrefixHolder,
    PricedWorker,
    Reuse,
    cached_tokens,
    with_likely_rates,
)
from tests.unit.router.snapshots import decode_cost, prefill_cost, with_load
from tests.unit.router.snapshots import snapshot as worker

FAST = PairRate("nixl", 1e-3, 2e9)
SLOW = PairRate("grpc", 40e-3, 2e6)
MEASURED = WorkerRates(PrefillRate(5e-3, 1e-3, 2e-7), block_bytes=360 << 10, measured=True)

counts = st.integers(0, 500)
prices = st.floats(0, 0.1)
rates = st.builds(
    WorkerRates,
    st.builds(PrefillRate, prices, st.floats(1e-6, 1e-2), st.floats(0, 1e-6)),
    st.builds(DecodeRate, prices, prices),
    st.sampled_from([64, 512]),
    st.sampled_from([0, 360 << 10]),
    st.booleans(),
    st.sampled_from([(), (WindowBytes(33, 300 << 10),)]),
).filter(lambda rates: rates.block_bytes or not rates.windows)
pairs = st.dictionaries(
    st.sampled_from([f"w{i}" for i in range(8)]),
    st.builds(PairRate, st.just("nixl"), prices, st.floats(1e5, 1e10)),
)
snapshots = st.builds(
    worker,
    st.just("?"),
    st.sampled_from(["prefill", "decode"]),
    state=st.sampled_from(["starting", "ready", "ready", "draining"]),
    reachable=st.booleans(),
    num_running=counts,
    num_waiting=counts,
    queued_tokens=st.integers(0, 100_000),
    num_leases=counts,
    blocks_total=st.sampled_from([0, 100, 5000]),
    blocks_used=st.integers(0, 100),
    groups=st.sampled_from([(), (GroupLoad(100, 90), GroupLoad(50, 0, 4))]),
    rates=rates,
    pairs=pairs,
)
clusters = st.lists(snapshots, max_size=8).map(
    lambda ws: [replace(w, worker_id=f"w{i}", epoch=f"w{i}/1") for i, w in enumerate(ws)]
)
works = st.builds(Work, st.integers(1, 50_000), st.sampled_from([1, 16, 64]))
matches_of = st.dictionaries(st.sampled_from([f"w{i}" for i in range(8)]), st.integers(0, 4000))


@given(works, clusters, matches_of, st.integers())
def test_never_chooses_who_cannot_serve(
    work: Work, workers: list[WorkerSnapshot], matches: dict[str, int], seed: int
) -> None:
    placement = choose(work, workers, matches, Random(seed))
    fit = [w for w in workers if w.state == "ready" and w.reachable]
    if placement is None:
        assert not [w for w in fit if w.role == "decode"]
        return
    assert placement.decode in fit
    assert placement.decode.role == "decode"
    candidates = placement.prefill_candidates
    prefill = [w for w in fit if w.role == "prefill"]
    assert set(candidates) <= set(prefill)
    assert len(candidates) == len(set(candidates)) == min(len(prefill), PREFILL_CANDIDATES_MAX)


@given(works, clusters, matches_of)
def test_who_refused_is_not_asked_again(
    work: Work, workers: list[WorkerSnapshot], matches: dict[str, int]
) -> None:
    refused: frozenset[str] = frozenset()
    asked = 0
    while placement := choose(work, workers, matches, Random(0), refused=refused):
        assert placement.decode.epoch not in refused
        refused |= {placement.decode.epoch}
        asked += 1
    assert asked == sum(w.usable and w.role == "decode" for w in workers)


def no_more(one: float, other: float) -> bool:
    """Sums of floats in another order differ in the last digits."""
    return one <= other * (1 + 1e-9) + 1e-12


@given(works, snapshots, st.integers(0, 4000), st.integers(0, 4000), clusters)
def test_more_cached_never_costs_more(
    work: Work,
    one: WorkerSnapshot,
    depth: int,
    deeper_by: int,
    others: list[WorkerSnapshot],
) -> None:
    theirs = {w.worker_id: 7 * i for i, w in enumerate(others)}
    less, more = ({one.worker_id: d, **theirs} for d in (depth, depth + deeper_by))
    assert no_more(
        decode_cost(work, one, more, producers=others),
        decode_cost(work, one, less, producers=others),
    )
    held = {w.worker_id: cached_tokens(work, w, theirs) for w in others}
    assert no_more(
        prefill_cost(work, one, more, held=held), prefill_cost(work, one, less, held=held)
    )


@given(works, snapshots, clusters, matches_of)
def test_one_who_has_the_prefix_never_makes_prefill_slower(
    work: Work, one: WorkerSnapshot, holders: list[WorkerSnapshot], matches: dict[str, int]
) -> None:
    alone = prefill_cost(work, one, matches)
    held = {w.worker_id: cached_tokens(work, w, matches) for w in holders}
    assert no_more(prefill_cost(work, one, matches, held=held), alone)


@given(works, clusters, matches_of, st.integers(1, 100), st.data())
def test_more_cached_never_takes_a_worker_out_of_the_choice(
    work: Work,
    workers: list[WorkerSnapshot],
    matches: dict[str, int],
    deeper_by: int,
    data: st.DataObject,
) -> None:
    if not workers:
        return
    costs = {w.worker_id: decode_cost(work, w, matches, producers=workers) for w in workers}

    def chosen() -> list[WorkerSnapshot]:
        return [
            c.worker
            for c in near_best([PricedWorker(w, Reuse(0), costs[w.worker_id]) for w in workers])
        ]

    before = chosen()
    lucky = data.draw(st.sampled_from(before))
    deeper = {**matches, lucky.worker_id: matches.get(lucky.worker_id, 0) + deeper_by}
    costs[lucky.worker_id] = decode_cost(work, lucky, deeper, producers=workers)
    after = chosen()
    assert lucky in after
    assert len(after) <= len(before)


@given(works, snapshots, counts, counts, st.integers(0, 10_000))
def test_more_load_never_costs_less(
    work: Work, one: WorkerSnapshot, running: int, waiting: int, queued: int
) -> None:
    busier = with_load(
        one,
        num_running=one.load.num_running + running,
        num_waiting=one.load.num_waiting + waiting,
        queued_tokens=one.load.queued_tokens + queued,
    )
    for producers in ([], [one]):
        before = decode_cost(work, one, {}, producers=producers)
        assert no_more(before, decode_cost(work, busier, {}, producers=producers))
    assert no_more(prefill_cost(work, one, {}), prefill_cost(work, busier, {}))


def test_equal_workers_share_the_requests() -> None:
    workers = [worker("a"), worker("b"), worker("c")]
    rng = Random(1)
    chosen = [choose(Work(100), workers, {}, rng) for _ in range(300)]
    counted = [sum(p.decode is w for p in chosen if p) for w in workers]
    assert min(counted) > 60


def test_a_cached_prefix_draws_and_load_repels() -> None:
    matches = {"b": 60}
    idle = [worker("a"), worker("b")]
    for seed in range(20):
        placement = choose(Work(1000), idle, matches, Random(seed))
        assert placement is not None
        assert placement.decode.worker_id == "b"
    busy = [worker("a"), worker("b", num_running=60)]
    placement = choose(Work(1000), busy, matches, Random(0))
    assert placement is not None
    assert placement.decode.worker_id == "a"


def test_free_blocks_of_one_pool_do_not_hide_that_another_is_full() -> None:
    """Each worker has 510 free blocks of 1,500. The prompt takes 100 of the first pool."""
    free = GroupLoad(1000, 590)
    full = GroupLoad(1000, 990)
    told = {"blocks_total": 1500, "blocks_used": 990}
    workers = [
        worker("full", groups=(full, GroupLoad(500, 0, 34)), **told),
        worker("free", groups=(free, GroupLoad(500, 400, 34)), num_running=1, **told),
    ]
    for seed in range(20):
        placement = choose(Work(1600), workers, {}, Random(seed))
        assert placement is not None
        assert placement.decode.worker_id == "free"


def test_the_reason_says_what_was_weighed() -> None:
    workers = [worker("d", num_running=2, blocks_total=10, blocks_used=5), worker("p", "prefill")]
    placement = choose(Work(100), workers, {"d": 3}, Random(0))
    assert placement is not None
    for part in ("decode=d", "cached=48/100", "running=2", "kv=0.50", "of=1", "prefill=p"):
        assert part in placement.summary


@given(works, clusters, matches_of, st.integers())
def test_prefix_holders_have_more_than_the_first_candidate_and_are_others(
    work: Work, workers: list[WorkerSnapshot], matches: dict[str, int], seed: int
) -> None:
    placement = choose(work, workers, matches, Random(seed))
    if placement is None:
        return
    first = (*placement.prefill_candidates, placement.decode)[0]
    depths = [matches[h.worker.worker_id] for h in placement.prefix_holders]
    assert depths == sorted(depths, reverse=True)
    assert all(depth > matches.get(first.worker_id, 0) for depth in depths)
    holders = [h.worker for h in placement.prefix_holders]
    assert all(w.usable and w in workers for w in holders)
    assert placement.decode not in holders
    assert first not in holders


def test_without_rates_all_have_the_prices_of_the_guess() -> None:
    guess = WorkerRates()
    token_s = token_seconds(WorkerRates())
    idle = worker("p", "prefill")
    busy = worker("p", "prefill", queued_tokens=300, num_leases=2)
    assert prefill_cost(Work(100), idle, {"p": 2}) == prefill_seconds(guess, 100, 32)
    prompt_s = prefill_seconds(guess, 100, 0)
    expected_s = queue_seconds(guess, 300) + 2 * 32 * token_s + 3 * prompt_s
    assert prefill_cost(Work(100), busy, {}) == pytest.approx(expected_s)
    running = worker("d", num_running=2, num_waiting=1)
    price = decode_cost(Work(100), running, {}, producers=[idle])
    expected_s = 2 * 24 * guess.decode.sequence_s + 64 * token_s + 0.25 * 2 * prompt_s
    assert price == pytest.approx(expected_s)


def test_a_slow_worker_gets_less_and_one_that_is_new_is_taken_for_like_the_others() -> None:
    slow = WorkerRates(PrefillRate(5e-3, 4e-3, 2e-7), measured=True)
    workers = [
        worker("d"),
        worker("p0", "prefill", rates=MEASURED),
        worker("p1", "prefill", rates=slow),
        worker("p2", "prefill", rates=MEASURED),
        worker("new", "prefill"),
    ]
    placements = [choose(Work(1000), workers, {}, Random(seed)) for seed in range(60)]
    first = {p.prefill_candidates[0].worker_id for p in placements if p}
    assert first == {"p0", "p2", "new"}
    known = {w.worker_id: w.rates for w in with_likely_rates(workers)}
    assert known["new"].prefill == MEASURED.prefill
    assert known["p1"] == slow


def test_decode_goes_where_blocks_come_fast() -> None:
    near = worker("near", rates=MEASURED, pairs={"p": FAST})
    far = worker("far", rates=MEASURED, pairs={"p": SLOW})
    workers = [near, far, worker("p", "prefill", rates=MEASURED)]
    for seed in range(20):
        placement = choose(Work(4000), workers, {}, Random(seed))
        assert placement is not None
        assert placement.decode is near


def test_with_windows_a_pull_is_priced_by_what_moves() -> None:
    """250 blocks of 360 KiB take 1.8 s; 300 KiB of each but of 33 do not move."""
    windows = msgspec.structs.replace(MEASURED, windows=(WindowBytes(33, 300 << 10),))
    pair = PairRate("grpc", 0.0, 50 << 20)
    producers = [worker("p", "prefill")]

    def cost(rates: WorkerRates) -> float:
        decode = worker("d", rates=rates, pairs={"p": pair})
        return decode_cost(Work(4000), decode, {}, producers=producers)

    assert cost(MEASURED) == pytest.approx(250 * 360 / 51200)
    assert cost(windows) == pytest.approx((250 * 60 + 33 * 300) / 51200)


def test_prefill_that_can_pull_the_prefix_is_preferred_and_told_from_whom() -> None:
    holder = worker("d", rates=MEASURED)
    near = worker("near", "prefill", rates=MEASURED, pairs={"d": FAST})
    far = worker("far", "prefill", rates=MEASURED, pairs={"d": SLOW})
    other = worker("e", rates=MEASURED, pairs={"near": FAST, "far": FAST})
    for seed in range(20):
        placement = choose(
            Work(4100),
            [holder, near, far, other],
            {"d": 250},
            Random(seed),
            refused=frozenset({"d/1"}),
        )
        assert placement is not None
        assert placement.prefill_candidates == (near, far)
        assert placement.prefix_holders == (PrefixHolder(holder, 250),)


def test_of_many_workers_the_one_that_has_the_prompt_is_found() -> None:
    workers = [worker(f"d{i}", rates=MEASURED) for i in range(300)]
    everybody = {f"d{i}": 1 for i in range(300)}
    for seed in range(20):
        placement = choose(Work(1000), workers, {**everybody, "d77": 40}, Random(seed))
        assert placement is not None
        assert placement.decode.worker_id == "d77"
    chosen = {
        p.decode.worker_id
        for seed in range(200)
        if (p := choose(Work(1000), workers, everybody, Random(seed)))
    }
    assert len(chosen) > 100


def test_of_many_workers_one_that_has_nearly_all_is_found_where_those_with_more_leave() -> None:
    leaving = [worker(f"x{i}", rates=MEASURED, state="draining") for i in range(20)]
    workers = [worker(f"d{i}", rates=MEASURED) for i in range(300)] + leaving
    matches = {w.worker_id: 40 for w in leaving} | {f"d{i}": 1 for i in range(300)} | {"d77": 36}
    for seed in range(20):
        placement = choose(Work(1000), workers, matches, Random(seed))
        assert placement is not None
        assert placement.decode.worker_id == "d77"


def test_of_many_workers_the_busy_ones_are_avoided() -> None:
    workers = [worker(f"d{i}", num_running=0 if i % 4 == 0 else 50) for i in range(300)]
    workers += [worker(f"p{i}", "prefill", queued_tokens=9 * i) for i in range(300)]
    for seed in range(50):
        placement = choose(Work(1000), workers, {}, Random(seed))
        assert placement is not None
        assert len(placement.prefill_candidates) == PREFILL_CANDIDATES_MAX
    idle = [choose(Work(1000), workers, {}, Random(seed)) for seed in range(200)]
    assert sum(p.decode.load.num_running == 0 for p in idle if p) > 150


def test_of_many_workers_the_only_one_left_is_found() -> None:
    workers = [worker(f"d{i}", state="draining") for i in range(300)]
    workers[123] = worker("d123")
    workers[200] = worker("d200")
    workers[45] = worker("p45", "prefill")
    placement = choose(Work(100), workers, {"d7": 3}, Random(0), refused=frozenset({"d200/1"}))
    assert placement is not None
    assert placement.decode.worker_id == "d123"
    assert [w.worker_id for w in placement.prefill_candidates] == ["p45"]
    assert placement.prefix_holders == ()


def test_workers_that_cannot_exchange_kv_are_never_paired_and_both_kinds_serve() -> None:
    old = [
        worker("d-old", compatibility_key=b"1"),
        worker("p-old", "prefill", compatibility_key=b"1"),
    ]
    new = [
        worker("d-new", compatibility_key=b"2"),
        worker("p-new", "prefill", compatibility_key=b"2"),
    ]
    chosen = set()
    for seed in range(40):
        placement = choose(Work(500), [*old, *new], {"p-old": 9, "d-new": 3}, Random(seed))
        assert placement is not None
        kind = placement.decode.compatibility_key
        chosen.add(kind)
        holders = [h.worker for h in placement.prefix_holders]
        partners = (*placement.prefill_candidates, *holders)
        assert partners
        assert all(w.compatibility_key == kind for w in partners)
    assert chosen == {b"1", b"2"}


def test_in_an_upgrade_the_generation_that_can_take_it_does() -> None:
    leaves = worker("d-old", compatibility_key=b"1", state="draining")
    stays = [
        worker("d-new", compatibility_key=b"2"),
        worker("p-old", "prefill", compatibility_key=b"1"),
    ]
    placement = choose(Work(500), [leaves, *stays], {}, Random(0))
    assert placement is not None
    assert placement.decode.worker_id == "d-new"
    assert placement.prefill_candidates == ()
    refused = frozenset({"d-new/1"})
    assert choose(Work(500), [leaves, *stays], {}, Random(0), refused=refused) is None


IN_SESSION = Work(1000, is_of_session=True)


def two_decode_workers(running: int) -> list[WorkerSnapshot]:
    """Computing a token takes 1 ms, and a running sequence costs 24 ms."""
    rates = WorkerRates(
        PrefillRate(0.0, 1e-3, 0.0), DecodeRate(0.0, 1e-3), 512, 16 << 10, measured=True
    )
    pull = {"p": FAST}
    return [
        worker("keeper", rates=rates, pairs=pull, num_running=running),
        worker("idle", rates=rates, pairs=pull),
        worker("p", "prefill", rates=rates),
    ]


def where(work: Work, workers: list[WorkerSnapshot], matches: dict[str, int]) -> str:
    placement = choose(work, workers, matches, Random(0))
    assert placement is not None
    return placement.decode.worker_id


def test_a_turn_stays_on_the_worker_that_has_its_history() -> None:
    workers = two_decode_workers(running=20)  # 480 ms more than the idle one
    assert where(Work(1000), workers, {"keeper": 50}) == "idle"
    assert where(IN_SESSION, workers, {"keeper": 50}) == "keeper"  # 800 tokens: 800 ms


def test_a_turn_leaves_a_worker_that_is_too_busy() -> None:
    workers = two_decode_workers(running=40)  # 960 ms
    assert where(IN_SESSION, workers, {"keeper": 50}) == "idle"


def test_what_other_workers_hold_as_well_keeps_no_turn() -> None:
    """A whole application may send one prompt_cache_key, with one system prompt."""
    workers = two_decode_workers(running=20)
    assert where(IN_SESSION, workers, {"keeper": 50, "idle": 50}) == "idle"
    assert where(IN_SESSION, workers, {"keeper": 50, "idle": 25}) == "idle"
    assert where(IN_SESSION, workers, {"keeper": 62, "idle": 25}) == "keeper"


def test_a_turn_stays_on_no_worker_that_refused_it_or_drains() -> None:
    workers = two_decode_workers(running=0)
    placement = choose(
        IN_SESSION, workers, {"keeper": 50}, Random(0), refused=frozenset(("keeper/1",))
    )
    assert placement is not None
    assert placement.decode.worker_id == "idle"
    draining = [replace(workers[0], state="draining"), *workers[1:]]
    assert where(IN_SESSION, draining, {"keeper": 50}) == "idle"


@given(st.lists(counts, min_size=2, max_size=6), st.lists(counts, min_size=6, max_size=6))
def test_a_turn_costs_at_most_what_it_saves(running: list[int], depths: list[int]) -> None:
    rates = WorkerRates(PrefillRate(0.0, 1e-3, 0.0), DecodeRate(0.0, 1e-3), 512, measured=True)
    workers = [worker(f"w{n}", rates=rates, num_running=count) for n, count in enumerate(running)]
    matches = {w.worker_id: depth % 63 for w, depth in zip(workers, depths, strict=False)}
    placement = choose(IN_SESSION, workers, matches, Random(0))
    assert placement is not None
    chosen = decode_cost(IN_SESSION, placement.decode, matches, producers=())
    least = min(decode_cost(IN_SESSION, w, matches, producers=()) for w in workers)
    assert chosen - least <= 1.0 + 8e-3 + 1e-9

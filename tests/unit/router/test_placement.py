from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from services.router.placement import (
    PREFILL_CANDIDATES_MAX,
    Work,
    WorkerSnapshot,
    choose,
    decode_cost,
    near_best,
    prefill_cost,
)


def worker(worker_id: str, role: str = "decode", **more: object) -> WorkerSnapshot:
    values = {"epoch": f"{worker_id}/1", "address": f"{worker_id}:1", "state": "ready", **more}
    return WorkerSnapshot(worker_id=worker_id, role=role, **values)  # type: ignore[arg-type]


counts = st.integers(0, 500)
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


@given(works, snapshots, st.integers(0, 4000), st.integers(0, 4000), st.booleans())
def test_more_cached_never_costs_more(
    work: Work, one: WorkerSnapshot, depth: int, deeper_by: int, pulls: bool
) -> None:
    less, more = {one.worker_id: depth}, {one.worker_id: depth + deeper_by}
    assert decode_cost(work, one, more, pulls=pulls) <= decode_cost(work, one, less, pulls=pulls)
    assert prefill_cost(work, one, more) <= prefill_cost(work, one, less)


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
    costs = {w.worker_id: decode_cost(work, w, matches, pulls=True) for w in workers}
    before = near_best(workers, costs)
    lucky = data.draw(st.sampled_from(before))
    deeper = {**matches, lucky.worker_id: matches.get(lucky.worker_id, 0) + deeper_by}
    costs[lucky.worker_id] = decode_cost(work, lucky, deeper, pulls=True)
    after = near_best(workers, costs)
    assert lucky in after
    assert len(after) <= len(before)


@given(works, snapshots, counts, counts, st.integers(0, 10_000))
def test_more_load_never_costs_less(
    work: Work, one: WorkerSnapshot, running: int, waiting: int, queued: int
) -> None:
    busier = replace(
        one,
        num_running=one.num_running + running,
        num_waiting=one.num_waiting + waiting,
        queued_tokens=one.queued_tokens + queued,
    )
    assert decode_cost(work, busier, {}, pulls=True) >= decode_cost(work, one, {}, pulls=True)
    assert prefill_cost(work, busier, {}) >= prefill_cost(work, one, {})


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


def test_the_reason_says_what_was_weighed() -> None:
    workers = [worker("d", num_running=2, blocks_total=10, blocks_used=5), worker("p", "prefill")]
    placement = choose(Work(100), workers, {"d": 3}, Random(0))
    assert placement is not None
    for part in ("decode=d", "cached=48/100", "running=2", "kv=0.50", "of=1", "prefill=p"):
        assert part in placement.reason

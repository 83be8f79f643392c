"""Placement knows what workers can load from tiers below their pools, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.common.perf_model.predict import prefill_seconds
from tandem.common.perf_model.rates import PairRate, TierRate, WindowBytes, WorkerRates
from tandem.prefix_index.holders import source_of, with_shared_tiers
from tandem.router.placement.choose import Placement, choose
from tandem.router.placement.costs import Work, WorkerSnapshot, reuse
from tests.unit.router.snapshots import decode_cost, prefill_cost
from tests.unit.router.snapshots import snapshot as worker
from tests.unit.router.test_placement import MEASURED

WORK = Work(4000)  # computed in 5.6 s
FAST = PairRate("nixl", 1e-3, 2e9)


def rates(*tiers: tuple[str, float]) -> WorkerRates:
    """Measured rates; `tiers` are names and seconds to load a block."""
    return msgspec.structs.replace(MEASURED, tiers=tuple(TierRate(*tier) for tier in tiers))


def placed(
    workers: Sequence[WorkerSnapshot], matches: dict[str, int], seed: int, work: Work = WORK
) -> Placement:
    placement = choose(work, workers, matches, Random(seed))
    assert placement is not None
    return placement


def test_a_chat_returns_to_the_worker_that_can_load_it() -> None:
    a, b = (worker(name, rates=rates(("disk", 1e-3))) for name in "ab")
    for seed in range(20):
        placement = placed([a, b], {"a#disk": 240}, seed)
        assert placement.decode is a
        assert placement.tokens_missing == 4000 - 3840
        assert "cached=3840/4000 load=240ms" in placement.summary
        assert placement.prefix_holders == ()


def test_of_windows_only_the_last_blocks_are_priced() -> None:
    """Half of a block's bytes are of a window that holds 10 blocks: 240 full and 10 of it come."""
    mixed = msgspec.structs.replace(
        rates(("disk", 1e-3)), block_bytes=100, windows=(WindowBytes(10, 50),)
    )
    found = reuse(WORK, worker("a", rates=mixed), {"a#disk": 240})
    assert (found.num_tokens, found.load_s) == (3840, pytest.approx(0.125))


def test_what_is_in_the_store_is_loaded_wherever_there_is_room() -> None:
    """Each worker that has the store, at the price that it measured itself."""
    found = with_shared_tiers({"gone#store": 240})
    near = worker("a", rates=rates(("store", 1e-3)))
    far = worker("b", rates=rates(("store", 5e-3)))
    without = worker("c", rates=rates(("disk", 1e-3)))
    assert (reuse(WORK, near, found).num_tokens, reuse(WORK, without, found).num_tokens) == (
        3840,
        0,
    )
    for seed in range(20):
        assert placed([near, far, without], found, seed).decode is near
    busy = worker("a", rates=rates(("store", 1e-3)), num_running=200)
    for seed in range(20):
        assert placed([busy, far, without], found, seed).decode is far


def test_of_many_workers_the_one_that_can_load_it_is_found() -> None:
    workers = [worker(f"d{i}", rates=rates(("host", 1e-4))) for i in range(300)]
    matches = {f"d{i}": 1 for i in range(300)} | {"d77#host": 240}
    for seed in range(20):
        assert placed(workers, matches, seed).decode.worker_id == "d77"


def test_a_tier_that_is_slower_than_computing_draws_nobody() -> None:
    slow = worker("a", rates=rates(("disk", 20.0)))
    assert reuse(WORK, slow, {"a#disk": 240}).num_tokens == 0
    b = worker("b", rates=rates(("disk", 20.0)))
    chosen = {placed([slow, b], {"a#disk": 240}, seed).decode.worker_id for seed in range(40)}
    assert chosen == {"a", "b"}


def test_loads_under_way_count() -> None:
    """Both can load the prompt in 240 ms; one has loads of 9 s under way."""
    idle, busy = (
        worker(name, rates=msgspec.structs.replace(rates(("disk", 1e-3)), load_queue_s=queue_s))
        for name, queue_s in (("idle", 0.0), ("busy", 9.0))
    )
    matches = {"idle#disk": 240, "busy#disk": 240}
    for seed in range(20):
        assert placed([idle, busy], matches, seed).decode is idle
    assert reuse(WORK, busy, matches).num_tokens == 0


def test_a_slow_tier_helps_while_the_worker_computes() -> None:
    """A block takes longer to load than to compute: both ends meet before either is through."""
    slow = worker("a", rates=rates(("disk", 0.05)))
    reused = reuse(WORK, slow, {"a#disk": 240})
    assert reused.num_tokens == 3840
    assert 2.0 < reused.load_s < prefill_seconds(MEASURED, 3840, 0)


def test_load_over_prefix_holds_for_tiers_too() -> None:
    """240 ms to load and 60 sequences that run there, against 5.6 s of computing; then 4,000."""
    busy = worker("a", rates=rates(("disk", 1e-3)), num_running=4000)
    placement = placed([busy, worker("b", rates=rates(("disk", 1e-3)))], {"a#disk": 240}, 0)
    assert placement.decode.worker_id == "b"


@pytest.mark.parametrize(
    ("loads", "pulls", "soonest"),
    [
        (1e-3, PairRate("nixl", 1e-3, 1e8), "loads"),  # 0.25 s against 0.9 s
        (8e-3, PairRate("nixl", 1e-3, 2e9), "pulls"),  # 2.0 s against 0.05 s
        (20.0, PairRate("nixl", 1e-3, 2e6), "computes"),  # 20 s for a block, 46 s, or 5.6 s
    ],
)
def test_load_pull_or_compute_whichever_is_soonest(
    loads: float, pulls: PairRate, soonest: str
) -> None:
    holder = worker("d", rates=MEASURED)
    workers = [
        holder,
        worker("loads", "prefill", rates=rates(("disk", loads)), queued_tokens=20),
        worker("pulls", "prefill", rates=MEASURED, pairs={"d": pulls}, queued_tokens=20),
        worker("computes", "prefill", rates=MEASURED),
    ]
    for seed in range(10):
        placement = placed(workers, {"d": 250, "loads#disk": 250}, seed, Work(4100))
        assert placement.prefill_candidates[0].worker_id == soonest


def test_a_worker_that_is_too_busy_lends_what_its_tiers_have() -> None:
    """The pool has 10 blocks, host memory 100 and the disk 240; the store is no worker's own."""
    tiers = (("host", 1e-4), ("disk", 1e-3), ("store", 1e-3))
    busy = worker("a", rates=rates(*tiers), num_running=4000)
    workers = [busy, worker("b", rates=MEASURED)]
    matches = {"a": 10, "a#host": 100, "a#disk": 240, "a#store": 248, "#store": 248}
    for seed in range(10):
        placement = placed(workers, matches, seed)
        assert placement.decode.worker_id == "b"
        lent = [(h.worker, h.num_blocks, round(h.load_s, 6)) for h in placement.prefix_holders]
        assert lent == [(busy, 240, 0.149), (busy, 100, 0.009), (busy, 10, 0.0)]


def test_loads_under_way_delay_what_a_worker_lends() -> None:
    busy = worker(
        "a",
        rates=msgspec.structs.replace(rates(("disk", 1e-3)), load_queue_s=2.0),
        num_running=4000,
    )
    (holder,) = placed([busy, worker("b", rates=MEASURED)], {"a#disk": 240}, 0).prefix_holders
    assert holder.load_s == pytest.approx(2.24)


def test_a_whole_prompt_in_a_tier_is_lent_without_its_last_token() -> None:
    busy = worker("a", rates=rates(("disk", 1e-3)), num_running=4000)
    (holder,) = placed([busy, worker("b", rates=MEASURED)], {"a#disk": 250}, 0).prefix_holders
    assert holder.num_blocks == 249


@pytest.mark.parametrize(
    ("block_s", "soonest"),
    [
        (1e-3, "pulls"),  # loaded in 0.25 s and pulled in 0.05 s
        (0.02, "computes"),  # 5 s, about as long as to compute it
    ],
)
def test_prefill_that_can_pull_from_a_tier_is_preferred_if_that_is_sooner(
    block_s: float, soonest: str
) -> None:
    workers = [
        worker("d", rates=rates(("host", block_s))),
        worker("pulls", "prefill", rates=MEASURED, pairs={"d": FAST}, queued_tokens=600),
        worker("computes", "prefill", rates=MEASURED),
    ]
    for seed in range(10):
        placement = placed(workers, {"d#host": 250}, seed, Work(4100))
        if placement.decode.worker_id == "d":
            assert placement.prefill_candidates[0].worker_id == soonest


tier_rates = st.lists(
    st.tuples(st.sampled_from(["host", "disk"]), st.floats(0, 0.05)),
    unique_by=lambda tier: tier[0],
    max_size=2,
)
depths = st.dictionaries(st.sampled_from(["", "host", "disk"]), st.integers(0, 400))


@given(st.integers(1, 5000), tier_rates, depths)
def test_a_tier_never_makes_a_worker_dearer(
    num_tokens: int, tiers: list[tuple[str, float]], depths: dict[str, int]
) -> None:
    work = Work(num_tokens)
    one = worker("w", rates=rates(*tiers))
    matches = {source_of("w", name): depth for name, depth in depths.items()}
    pool = {"w": depths.get("", 0)}
    reused = reuse(work, one, matches)
    plain = reuse(work, one, pool)
    assert plain.load_s == 0
    assert plain.num_tokens <= reused.num_tokens < num_tokens
    computed_s = prefill_seconds(MEASURED, reused.num_tokens, plain.num_tokens)
    assert reused.load_s <= computed_s or reused == plain
    slack = 1.0 + 1e-9
    steps_s = MEASURED.prefill.step_s  # a prompt in two parts may take a step more
    for cost in (
        lambda known: decode_cost(work, one, known, producers=[]),
        lambda known: prefill_cost(work, one, known),
    ):
        assert cost(matches) <= slack * cost(pool) + steps_s

"""Blocks are loaded, pulled or computed: whichever is soonest, and where both ends meet best."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.common.perf_model.predict import LOCAL_MARGIN
from tandem.common.perf_model.rates import PrefillRate
from tandem.common.perf_model.soonest import (
    GAIN_MIN,
    GAIN_MIN_S,
    UNSURE,
    LoadChoice,
    Offer,
    Producer,
    Prompt,
    TierReach,
    choose_soonest,
    load_seconds,
    produced_s,
)

SLACK = 1 + 1e-9
RATE = PrefillRate(step_s=0.0, token_s=0.01, token_context_s=0.0)

seconds = st.floats(0, 2)
block_seconds = st.floats(0, 0.5)
rates = st.builds(PrefillRate, st.floats(0, 0.05), st.floats(1e-4, 0.05), st.floats(0, 1e-4))
reaches = st.lists(st.builds(TierReach, st.integers(0, 60), block_seconds), max_size=3)
offers = st.none() | st.builds(Offer, st.integers(0, 60), seconds, block_seconds)
producers = st.none() | st.builds(
    Producer,
    rates,
    st.sampled_from([16, 512]),
    seconds,
    st.integers(0, 60),
    seconds,
    block_seconds,
    block_seconds,
)
prompts = st.builds(
    Prompt,
    num_tokens=st.integers(245, 400),
    block_size=st.just(4),
    num_held=st.integers(0, 60),
    rate=rates,
    step_tokens=st.sampled_from([16, 64, 512]),
    queue_s=seconds,
    num_delayed=st.integers(0, 3),
)


def of(num_held: int = 0, **more: float) -> Prompt:
    """A prompt of 100 blocks of 4 tokens and one token, each block computed in 40 ms."""
    return Prompt(401, 4, num_held, RATE, 10_000, **more)


@pytest.mark.parametrize(
    ("block_s", "first", "ends_s"),
    [
        (0.0004, 0, 0.04),  # a block is loaded before one is computed
        (0.04, 40, 2.4),  # both as fast, and computing is not sure
        (0.08, 57, 3.44),
    ],
)
def test_load_and_compute_meet(block_s: float, first: int, ends_s: float) -> None:
    choice = choose_soonest(of(), [TierReach(100, block_s)])
    assert (choice.first, choice.end) == (first, 100)
    assert choice.there_s == pytest.approx(ends_s, rel=0.02)


def test_a_tier_that_gives_no_block_in_time_is_left_alone() -> None:
    assert not choose_soonest(of(), [TierReach(100, 400.0)]).loads


def test_a_few_blocks_are_not_worth_a_chunk() -> None:
    """Five blocks could be computed meanwhile, of a load that takes a twelfth of the computing."""
    assert choose_soonest(of(), [TierReach(100, 0.0033)]).first == 0


def test_a_short_load_is_not_worth_a_chunk() -> None:
    """Eight of 42 ms could be saved, and as large a part of a load that is ten times as long."""
    rate = PrefillRate(step_s=0.0, token_s=0.002, token_context_s=0.0)
    short, long = (Prompt(401, 4, num_held, rate, 10_000) for num_held in (90, 0))
    assert choose_soonest(short, [TierReach(100, 0.004)]).first == 90
    assert choose_soonest(long, [TierReach(100, 0.004)]).first > 0


def test_who_computes_delays_others() -> None:
    assert choose_soonest(of(num_delayed=2), [TierReach(100, 0.04)]).first == 0


def test_queues_of_both_count() -> None:
    busy = choose_soonest(of(queue_s=1.0), [TierReach(100, 0.04)])
    assert busy.first < 40
    waits = choose_soonest(of(), [TierReach(100, 0.04)], load_queue_s=1.0)
    assert waits.first > 40
    assert not choose_soonest(of(), [TierReach(100, 0.04)], load_queue_s=9.0).loads


def test_a_slow_tier_below_a_fast_one_is_left_alone() -> None:
    choice = choose_soonest(of(), [TierReach(50, 0.0004), TierReach(100, 9.0)])
    assert (choice.first, choice.end) == (0, 50)


@pytest.mark.parametrize(
    ("offer", "loads", "pulls"),
    [
        (Offer(100, 0.1, 0.001), False, True),
        (Offer(100, 0.1, 0.05), True, False),
        (Offer(20, 0.1, 0.0), True, False),
    ],
)
def test_a_pull_against_a_load(offer: Offer, loads: bool, pulls: bool) -> None:
    choice = choose_soonest(of(), [TierReach(90, 0.005)], offer=offer)
    assert (choice.loads, choice.pulls) == (loads, pulls)


def test_the_rest_after_a_load_is_pulled() -> None:
    choice = choose_soonest(of(), [TierReach(60, 0.001)], offer=Offer(100, 0.1, 0.002), meets=False)
    assert (choice.end, choice.loads, choice.pulls) == (60, True, True)


FAST = PrefillRate(step_s=0.0, token_s=0.001, token_context_s=0.0)  # a tenth of RATE


@pytest.mark.parametrize(
    ("block_s", "producer", "end", "pulls"),
    [
        (0.02, Producer(FAST, 10_000, 0.1), 0, True),  # 0.5 s elsewhere, 2 s from the tier
        (0.02, Producer(FAST, 10_000, 5.0), 100, False),  # its queue is long
        (0.02, Producer(FAST, 10_000, 0.1, block_s=0.05), 100, False),  # its link is slow
        (0.02, Producer(RATE, 10_000, 0.1, 95), 0, True),  # it has nearly all
        (0.02, Producer(RATE, 10_000, 0.1, 95, there_s=9.0), 100, False),  # but not at once
        (0.0004, Producer(FAST, 10_000, 0.1), 100, False),
    ],
)
def test_a_load_against_prefill_elsewhere(
    block_s: float, producer: Producer, end: int, pulls: bool
) -> None:
    choice = choose_soonest(of(), [TierReach(100, block_s)], producer=producer, meets=False)
    assert (choice.end, choice.pulls) == (end, pulls)


def test_the_rest_after_a_load_is_computed_elsewhere() -> None:
    """The peer pulls what was loaded here, and this worker decodes meanwhile."""
    producer = Producer(FAST, 10_000, 0.1, given_block_s=0.0001)
    choice = choose_soonest(of(num_delayed=1), [TierReach(60, 0.001)], producer=producer)
    assert (choice.first, choice.end, choice.pulls) == (0, 60, True)


def test_a_tier_a_peer_and_prefill_elsewhere_compete() -> None:
    tier, peer, producer = TierReach(100, 0.01), Offer(100, 0.1, 0.01), Producer(FAST, 10_000, 0.6)
    fast = [TierReach(100, 0.001)], Offer(100, 0.1, 0.001), Producer(FAST, 10_000, 0.0)
    loaded = choose_soonest(of(), fast[0], offer=peer, producer=producer)
    pulled = choose_soonest(of(), [tier], offer=fast[1], producer=producer)
    elsewhere = choose_soonest(of(), [tier], offer=peer, producer=fast[2])
    assert [each.loads for each in (loaded, pulled, elsewhere)] == [True, False, False]
    assert [each.pulls for each in (loaded, pulled, elsewhere)] == [False, True, True]
    assert pulled.seconds == pytest.approx(0.2 + 0.01)
    assert elsewhere.seconds == pytest.approx(0.401)


def single_choices(
    prompt: Prompt, tiers: list[TierReach], queue_s: float, offer: Offer | None
) -> list[float]:
    """Costs of computing, loading or pulling alone."""
    ends = [(0.0, prompt.num_held)]
    for end in (tier.num_blocks for tier in tiers if tier.num_blocks > prompt.num_held):
        ends.append((queue_s + load_seconds(tiers, prompt.num_held, end), end))
    if offer is not None and offer.num_blocks > prompt.num_held:
        moved = offer.num_blocks - prompt.num_held
        ends.append((offer.latency_s + moved * offer.block_s, offer.num_blocks))
    return [
        max(prompt.queue_s, there_s) + (1 + prompt.num_delayed) * prompt.compute_s(end)
        for there_s, end in ends
    ]


@given(prompts, reaches, seconds, offers, st.booleans())
def test_never_worse_than_the_best_single_choice(
    prompt: Prompt, tiers: list[TierReach], queue_s: float, offer: Offer | None, meets: bool
) -> None:
    found = choose_soonest(prompt, tiers, load_queue_s=queue_s, offer=offer, meets=meets)
    assert found.cost_s <= SLACK * min(single_choices(prompt, tiers, queue_s, offer))
    assert found.seconds <= SLACK * found.cost_s
    assert prompt.num_held <= found.first
    if found.loads:
        assert found.end <= max(tier.num_blocks for tier in tiers)
        assert meets or found.first == prompt.num_held


@given(prompts, reaches, offers, producers, st.booleans())
def test_prefill_elsewhere_is_taken_only_if_it_is_about_the_soonest(
    prompt: Prompt,
    tiers: list[TierReach],
    offer: Offer | None,
    producer: Producer | None,
    meets: bool,
) -> None:
    prompt = msgspec.structs.replace(prompt, num_delayed=0)
    found = choose_soonest(prompt, tiers, offer=offer, producer=producer, meets=meets)
    ways = single_choices(prompt, tiers, 0.0, offer)
    if producer is not None:
        ways.append(produced_s(prompt, producer, prompt.num_held))
    assert found.seconds <= SLACK * min(ways) / LOCAL_MARGIN


@given(prompts, producers.filter(bool), st.integers(0, 60), st.integers(0, 60))
def test_a_producer_is_never_later_for_more_that_is_here(
    prompt: Prompt, producer: Producer, held: int, more: int
) -> None:
    less, most = sorted((held, more))
    assert produced_s(prompt, producer, most) <= SLACK * produced_s(prompt, producer, less)


@given(prompts, reaches, seconds)
def test_no_other_meeting_point_is_sooner(
    prompt: Prompt, tiers: list[TierReach], queue_s: float
) -> None:
    prompt = msgspec.structs.replace(prompt, num_delayed=0)
    found = choose_soonest(prompt, tiers, load_queue_s=queue_s)
    for end in {tier.num_blocks for tier in tiers}:
        for first in range(prompt.num_held, end):
            computed_s = prompt.queue_s + UNSURE * prompt.compute_s(prompt.num_held, first)
            loaded_s = queue_s + load_seconds(tiers, first, end)
            other_s = max(computed_s, loaded_s) + prompt.compute_s(end)
            assert found.cost_s <= SLACK * max(GAIN_MIN * other_s, other_s + GAIN_MIN_S)


@given(prompts, reaches, seconds, offers, st.floats(0, 1), st.data())
def test_a_faster_way_never_costs_more(
    prompt: Prompt,
    tiers: list[TierReach],
    queue_s: float,
    offer: Offer | None,
    times: float,
    data: st.DataObject,
) -> None:
    """Nobody is delayed: what is weighed is the time of this prompt alone."""
    prompt = msgspec.structs.replace(prompt, num_delayed=0)

    def cost(prompt: Prompt, tiers: list[TierReach], queue_s: float, offer: Offer | None) -> float:
        choice: LoadChoice = choose_soonest(prompt, tiers, load_queue_s=queue_s, offer=offer)
        return choice.cost_s

    before = cost(prompt, tiers, queue_s, offer)
    faster = [TierReach(tier.num_blocks, tier.block_s * times) for tier in tiers]
    nearer = offer and Offer(offer.num_blocks, offer.latency_s * times, offer.block_s * times)
    quicker = msgspec.structs.replace(prompt, rate=prompt.rate.stretched(times))
    assert cost(prompt, faster, queue_s, offer) <= SLACK * before
    assert cost(prompt, tiers, queue_s * times, offer) <= SLACK * before
    assert cost(prompt, tiers, queue_s, nearer) <= SLACK * before
    assert cost(quicker, tiers, queue_s, offer) <= SLACK * before

"""No worker is given more than its share, whatever prompts have in common; equal ones share alike.

The real placement and the real shares, over sequences of requests to a few workers. What is counted
is prefill: seconds of prompts that had to be computed there. A worker may have (1 + epsilon) times
the mean and one request, that is one whole prompt. Load is what a test says it is: none ever (each
request ends before the next comes), or all that was ever sent.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.common.perf_model.predict import prefill_seconds
from tandem.common.perf_model.rates import DecodeRate, PairRate, PrefillRate, WorkerRates
from tandem.router.placement.choose import (
    LOAD_EXCESS,
    NEAR_BEST_S,
    SHARE_EXCESS,
    Placement,
    Roster,
    Work,
    choose,
)
from tandem.router.placement.costs import TOKENS_PER_RUNNING
from tandem.router.placement.shares import HALF_LIFE_S, Shares
from tests.unit.router.snapshots import snapshot, with_load

RATES = WorkerRates(
    PrefillRate(5e-3, 1e-3, 2e-7), DecodeRate(1e-2, 1e-3), block_bytes=360 << 10, measured=True
)
TINY = WorkerRates(
    PrefillRate(1e-6, 1e-9, 0.0), DecodeRate(1e-6, 1e-9), block_bytes=16, measured=True
)
PAIR = PairRate("nixl", 1e-3, 1e9)
BLOCK = 16
ALONE = -1  # a conversation of one prompt


@dataclass
class Cluster:
    """Workers, what each holds of each conversation (in blocks), and who was given how much."""

    num_decode: int
    num_prefill: int
    seed: int
    backlog: bool  # queues are never worked off; else they are always empty
    roster: Roster = field(default_factory=Roster)
    shares: Shares = field(default_factory=Shares)
    held: dict[str, dict[int, int]] = field(default_factory=dict)
    queued: Counter[str] = field(default_factory=Counter)
    now_s: float = 0.0
    num_alone: int = 0

    def __post_init__(self) -> None:
        self.rng = Random(self.seed)
        self.role = "prefill" if self.num_prefill else "decode"  # of who is counted
        for number in range(self.num_decode):
            self.join(f"d{number}", "decode")
        for number in range(self.num_prefill):
            self.join(f"p{number}", "prefill")

    def join(self, worker_id: str, role: str = "") -> None:
        role = role or self.role
        self.shares.join(worker_id, self.roster.mean_prefill_share(role))
        self.held[worker_id] = {}
        self.roster.put(snapshot(worker_id, role, rates=RATES))
        peers = dict.fromkeys(self.held, PAIR)
        for known in list(self.roster.by_id.values()):
            self.roster.put(replace(known, pairs=peers))
        self._refresh(worker_id)

    def leave(self, worker_id: str) -> None:
        self.roster.remove(worker_id)
        del self.held[worker_id]

    def place(self, num_blocks: int, conversation: int) -> tuple[Placement, str]:
        """A prompt that begins like all others of its conversation; and who computes it."""
        if conversation == ALONE:
            self.num_alone += 1
            conversation = -1 - self.num_alone
        work = Work(num_blocks * BLOCK + 1, BLOCK)
        depths = {w: min(has.get(conversation, 0), num_blocks) for w, has in self.held.items()}
        matches = {w: depth for w, depth in depths.items() if depth}
        self.roster.second_weight = self.shares.second_weight(self.now_s)
        placement = choose(work, self.roster, matches, self.rng)
        assert placement is not None
        computes = (*placement.prefill_candidates, placement.decode)[0].worker_id
        missing = placement.tokens_missing
        told_s = prefill_seconds(RATES, work.num_tokens, work.num_tokens - missing)
        self.shares.sent(computes, told_s, self.now_s)
        if self.backlog:
            self.queued[computes] += missing
        for worker_id in (computes, placement.decode.worker_id):
            has = self.held[worker_id]
            has[conversation] = max(num_blocks, has.get(conversation, 0))
            self._refresh(worker_id)
        return placement, computes

    def given_s(self) -> dict[str, float]:
        """Prefill of each worker of the pool that computes, in seconds of now."""
        second = self.shares.second_weight(self.now_s)
        return {w: self.shares.share(w) / second for w in self.roster.pool(self.role)}

    def _refresh(self, worker_id: str) -> None:
        known = self.roster.by_id[worker_id]
        placed = self.shares.share(worker_id)
        queued = self.queued[worker_id]
        self.roster.put(replace(with_load(known, queued_tokens=queued), prefill_share=placed))


clusters = st.builds(
    Cluster,
    num_decode=st.integers(1, 4),
    num_prefill=st.sampled_from([0, 0, 1, 3, 4]),
    seed=st.integers(0, 1000),
    backlog=st.booleans(),
)
prompts = st.lists(
    st.tuples(st.integers(1, 300), st.sampled_from([0, 0, 1, ALONE, ALONE])),
    min_size=1,
    max_size=60,
)


def whole_s(num_blocks: int) -> float:
    return prefill_seconds(RATES, num_blocks * BLOCK + 1, 0)


def check_share(cluster: Cluster, computes: str, largest_s: float) -> None:
    given = cluster.given_s()
    mean_s = sum(given.values()) / len(given)
    assert given[computes] <= (1 + SHARE_EXCESS) * mean_s + largest_s + 1e-9


@given(clusters, prompts, st.floats(0, HALF_LIFE_S))
def test_nobody_gets_more_than_its_share_and_one_request(
    cluster: Cluster, prompts: list[tuple[int, int]], between_s: float
) -> None:
    """The bound holds from a cold start on, with hot prefixes, and with full and empty queues, as
    time passes."""
    for num_blocks, conversation in prompts:
        _, computes = cluster.place(num_blocks, conversation)
        check_share(cluster, computes, whole_s(num_blocks))
        cluster.now_s += between_s
    given = cluster.given_s()
    mean_s = sum(given.values()) / len(given)
    largest_s = max(whole_s(num_blocks) for num_blocks, _ in prompts)
    assert max(given.values()) <= (1 + SHARE_EXCESS) * mean_s + largest_s + 1e-9


@given(clusters, prompts, prompts)
def test_who_joins_is_not_given_everything_and_who_leaves_takes_nothing_along(
    cluster: Cluster, before: list[tuple[int, int]], after: list[tuple[int, int]]
) -> None:
    for prompt in before:
        cluster.place(*prompt)
    cluster.join("new")
    joined_s = cluster.given_s()["new"]
    for num_blocks, conversation in after:
        _, computes = cluster.place(num_blocks, conversation)
        check_share(cluster, computes, whole_s(num_blocks))
    total_s = sum(whole_s(num_blocks) for num_blocks, _ in after)
    largest_s = max(whole_s(num_blocks) for num_blocks, _ in after)
    num_workers = len(cluster.given_s())
    if num_workers > 1:
        mean_s = joined_s + total_s / num_workers
        assert cluster.given_s()["new"] <= (1 + SHARE_EXCESS) * mean_s + largest_s + 1e-9
    cluster.leave("new")
    for num_blocks, conversation in after:
        given = cluster.given_s()
        mean_s = sum(given.values()) / len(given)
        least_s = min(given.values())
        _, computes = cluster.place(num_blocks, conversation)
        # The mean is lower without it: who is over its share by that gets nothing for a while.
        allowed_s = max((1 + SHARE_EXCESS) * mean_s, least_s)
        assert cluster.given_s()[computes] <= allowed_s + whole_s(num_blocks) + 1e-9


@pytest.mark.parametrize("backlog", [False, True])
@pytest.mark.parametrize(("num_decode", "num_prefill"), [(8, 0), (4, 4), (2, 6)])
def test_equal_workers_share_equally(num_decode: int, num_prefill: int, backlog: bool) -> None:
    cluster = Cluster(num_decode, num_prefill, seed=1, backlog=backlog)
    for _ in range(800):
        cluster.place(20, ALONE)
    given = cluster.given_s()
    mean_s = sum(given.values()) / len(given)
    assert max(given.values()) <= (1 + SHARE_EXCESS) * mean_s + whole_s(20)
    assert min(given.values()) >= (1 - 2 * SHARE_EXCESS) * mean_s - whole_s(20)


@given(
    clusters,
    prompts,
    st.integers(1, 300),
    st.integers(0, 300),
    st.integers(0, 300),
    st.randoms(use_true_random=False),
)
@settings(max_examples=50)
def test_more_cached_never_takes_a_worker_out_of_the_choice(
    cluster: Cluster,
    prompts: list[tuple[int, int]],
    num_blocks: int,
    some: int,
    more: int,
    rng: Random,
) -> None:
    """Without peers to pull from: what one has more of makes others faster too, then."""
    for prompt in prompts:
        cluster.place(*prompt)
    workers = [replace(w, pairs={}) for w in cluster.roster.by_id.values()]
    roster = Roster(workers)
    work = Work(num_blocks * BLOCK + 1, BLOCK)
    one = rng.choice(list(roster.pool(cluster.role)))

    def may_compute(depth: int) -> bool:
        placements = (choose(work, roster, {one: depth}, Random(n)) for n in range(60))
        chosen = [(*p.prefill_candidates, p.decode)[0].worker_id for p in placements if p]
        return one in chosen

    few = min(some, num_blocks)
    many = min(some + more, num_blocks)
    assert may_compute(many) or not may_compute(few)


@given(st.integers(2, 6), st.integers(1, 300), st.integers(1, 60), st.integers(0, 1000))
def test_a_prefix_draws_no_more_sequences_than_it_saves(
    num_decode: int, num_blocks: int, num_requests: int, seed: int
) -> None:
    """The bound is that of decode workers while all sequences still decode there."""
    cluster = Cluster(num_decode, 2, seed, backlog=False)
    running: Counter[str] = Counter({f"d{n}": 0 for n in range(num_decode)})
    num_bytes = (num_blocks + 1) * RATES.block_bytes
    saved_s = min(PAIR.seconds(num_bytes), whole_s(num_blocks)) + NEAR_BEST_S
    for _ in range(num_requests):
        decode = cluster.place(num_blocks, 0)[0].decode.worker_id
        running[decode] += 1
        known = cluster.roster.by_id[decode]
        cluster.roster.put(with_load(known, num_running=running[decode]))
        excess = running[decode] - 1 - min(running.values())
        assert excess * TOKENS_PER_RUNNING * RATES.decode.sequence_s <= saved_s + 1e-9


@pytest.mark.parametrize("num_prefill", [0, 1])
def test_a_prompt_returns_to_who_holds_it_though_computing_it_costs_next_to_nothing(
    num_prefill: int,
) -> None:
    """Its KV is worth less than the load that is one step old can tell."""
    roles = {"d0": "decode", "d1": "decode"} | ({"p0": "prefill"} if num_prefill else {})
    workers = [snapshot(w, role, rates=TINY) for w, role in roles.items()]
    chosen = [choose(Work(400, BLOCK), workers, {"d1": 25}, Random(n)) for n in range(50)]
    assert {placement.decode.worker_id for placement in chosen if placement} == {"d1"}
    chosen = [choose(Work(400, BLOCK), workers, {}, Random(n)) for n in range(50)]
    assert {placement.decode.worker_id for placement in chosen if placement} == {"d0", "d1"}


@given(
    st.integers(2, 8),
    st.integers(1, 4),
    st.integers(1, 32),
    st.sampled_from([0, 1]),
    st.integers(0, 1000),
)
def test_a_burst_of_equal_prompts_at_several_routers_is_no_herd(
    num_decode: int, num_routers: int, num_each: int, num_prefill: int, seed: int
) -> None:
    """No router sees what the others send. One worker holds the prompt, which costs next to nothing
    to compute: it gets no more than its part, `LOAD_EXCESS` of that, and one from each router."""
    given: Counter[str] = Counter()
    for router in range(num_routers):
        rng = Random(seed + router)
        roster = Roster()
        for number in range(num_decode):
            name = f"d{number}"
            roster.put(snapshot(name, rates=TINY))
        for number in range(num_prefill):
            name = f"p{number}"
            roster.put(snapshot(name, "prefill", rates=TINY))
        for _ in range(num_each):
            placement = choose(Work(400, BLOCK), roster, {"d0": 25}, rng)
            assert placement is not None
            worker = placement.decode
            roster.put(with_load(worker, num_waiting=worker.load.num_waiting + 1))
            given[worker.worker_id] += 1
    mean = num_routers * num_each / num_decode
    assert max(given.values()) <= (1 + LOAD_EXCESS) * mean + num_routers

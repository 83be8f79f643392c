from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.router.admission.fair_queue import FairQueue

costs = st.floats(0.01, 100)
requests = st.lists(st.tuples(st.sampled_from("abc"), costs), max_size=60)


def drain(queue: FairQueue[object]) -> list[object]:
    return [queue.pop() for _ in range(len(queue))]


@given(st.lists(st.tuples(costs, st.booleans())))
def test_one_tenant_is_served_in_order(steps: list[tuple[float, bool]]) -> None:
    queue: FairQueue[int] = FairQueue()
    served = []
    for number, (cost, pops) in enumerate(steps):
        queue.push("a", cost, number)
        if pops:
            served.append(queue.pop())
    assert served + drain(queue) == list(range(len(steps)))  # type: ignore[operator]


@given(st.lists(costs, min_size=1, max_size=40), st.lists(costs, min_size=1, max_size=40))
def test_two_that_wait_get_equal_work_but_for_one_request(
    ones: list[float], others: list[float]
) -> None:
    queue: FairQueue[tuple[str, float]] = FairQueue()
    left = {"a": ones, "b": others}
    for name, wanted in left.items():
        for number, cost in enumerate(wanted):
            queue.push(name, cost, (name, number))  # type: ignore[arg-type]
    served = {"a": 0.0, "b": 0.0}
    counts = {"a": 0, "b": 0}
    while len(queue):
        name, number = queue.pop()
        served[name] += left[name][int(number)]
        counts[name] += 1
        share = sum(served.values()) / 2
        largest = max(max(ones), max(others))
        for each in left:
            assert abs(served[each] - share) <= largest + 1e-6
        if any(counts[each] == len(left[each]) for each in left):
            break


@given(requests)
def test_everybody_is_served_once_and_each_tenant_in_order(wanted: list[tuple[str, float]]) -> None:
    queue: FairQueue[int] = FairQueue()
    for number, (tenant, cost) in enumerate(wanted):
        queue.push(tenant, cost, number)
    served = drain(queue)  # type: ignore[arg-type]
    assert sorted(served) == list(range(len(wanted)))  # type: ignore[type-var]
    for name in "abc":
        mine = [n for n in served if wanted[n][0] == name]  # type: ignore[index,call-overload]
        assert mine == sorted(mine)
    with pytest.raises(IndexError):
        queue.pop()


@given(st.lists(costs, min_size=30, max_size=60), costs, st.integers(0, 25))
def test_who_floods_starves_nobody(flood: list[float], cost: float, before: int) -> None:
    """A new tenant waits for one request of each of two others, whatever they had sent before."""
    queue: FairQueue[object] = FairQueue()
    for number, each in enumerate(flood):
        queue.push("ab"[number % 2], each, number)
    for _ in range(before):
        queue.pop()
    queue.push("new", cost, "new")
    assert "new" in [queue.pop() for _ in range(3)]


@pytest.mark.parametrize("cost", [0.5, 1.0, 5.0])
def test_ever_new_tenants_starve_nobody(cost: float) -> None:
    """Ten of them always wait, as new sessions do while all workers are busy."""
    queue: FairQueue[object] = FairQueue()
    for number in range(4):
        queue.push("steady", 1.0, ("steady", number))
    num_served = 0
    for number in range(200):
        while len(queue) < 14:
            queue.push(f"new {number} {len(queue)}", cost, (number, len(queue)))
        num_served += queue.pop()[0] == "steady"  # type: ignore[index]
    assert num_served == 4


@given(requests, st.integers(0, 20), st.sampled_from("abc"), costs)
def test_says_what_is_ahead(
    wanted: list[tuple[str, float]], pops: int, tenant: str, cost: float
) -> None:
    queue: FairQueue[object] = FairQueue()
    for number, (name, each) in enumerate(wanted):
        queue.push(name, each, number)
    for _ in range(min(pops, len(wanted))):
        queue.pop()
    told = queue.cost_ahead(tenant)
    queue.push(tenant, cost, "mine")
    ahead: Counter[str] = Counter()
    largest: Counter[str] = Counter()
    while (item := queue.pop()) != "mine":
        name, each = wanted[item]  # type: ignore[call-overload]
        ahead[name] += each
        largest[name] = max(largest[name], each)
    slack = sum(each for name, each in largest.items() if name != tenant)
    assert told - slack - 1e-6 <= sum(ahead.values()) <= told + slack + 1e-6


def test_who_goes_away_costs_its_tenant_nothing() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("a", 100.0, "a0")
    queue.push("b", 10.0, "b0")
    queue.push("b", 10.0, "b1")
    assert queue.remove("a", "a0")
    assert not queue.remove("a", "a0")
    queue.push("a", 10.0, "a1")
    assert drain(queue) == ["b0", "a1", "b1"]  # type: ignore[arg-type]


@pytest.mark.parametrize(("forgets", "order"), [(False, ["b1", "a1"]), (True, ["a1", "b1"])])
def test_a_tenant_owes_what_it_got_until_all_is_forgotten(forgets: bool, order: list[str]) -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("a", 1000.0, "a0")
    queue.pop()
    if forgets:
        queue.forget()
    for item in ("a1", "b1"):
        queue.push(item[0], 1.0, item)
    assert drain(queue) == order  # type: ignore[arg-type]


@given(costs, st.integers(1, 8))
def test_work_is_shared_by_weight(cost: float, weight: int) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for number in range(90):
        queue.push("heavy", cost, ("heavy", number), weight=weight)
        queue.push("light", cost, ("light", number))
    served = Counter(queue.pop()[0] for _ in range(9 * (weight + 1)))
    assert abs(served["heavy"] - weight * served["light"]) <= weight + 1


def test_a_light_tenant_does_not_starve_behind_a_heavy_one() -> None:
    """Each turn of the heavy one moves its start, however little, and the light one's stays."""
    queue: FairQueue[object] = FairQueue()
    queue.push("heavy", 1.0, 0, weight=10_000)
    queue.pop()
    queue.push("light", 1.0, "light", weight=1)
    for number in range(1, 20):
        queue.push("heavy", 1.0, number, weight=10_000)
    assert queue.cost_ahead("light") == pytest.approx(20.0)
    assert "light" in [queue.pop() for _ in range(2)]

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.router.admission.turns import LATER_SHARE, Claim, Turns

costs = st.floats(0.01, 100)
claims = st.builds(
    Claim,
    tenant=st.sampled_from("ab"),
    cost=costs,
    weight=st.sampled_from([1.0, 100.0]),
    session=st.sampled_from(["", "s", "t"]),
    priority=st.integers(-1, 1),
    may_shed=st.booleans(),
)


def drain(turns: Turns[int]) -> list[int]:
    return [turns.pop() for _ in range(len(turns))]


def served(*waiting: Claim) -> list[int]:
    """Returns the numbers of the claims in the order of their turns."""
    turns: Turns[int] = Turns()
    for number, claim in enumerate(waiting):
        turns.push(claim, number)
    return drain(turns)


@given(st.lists(st.one_of(claims, st.none(), st.integers(0, 40)), max_size=60))
def test_each_request_leaves_exactly_once(steps: list[Claim | int | None]) -> None:
    """A claim waits, None serves the next one, and a number is a client that leaves."""
    turns: Turns[int] = Turns()
    waiting: set[int] = set()
    for number, step in enumerate(steps):
        if isinstance(step, Claim):
            assert turns.cost_ahead(step) >= 0
            turns.push(step, number)
            waiting.add(number)
        elif step is None and waiting:
            assert turns.last() in waiting
            waiting.remove(turns.pop())
        elif step is not None:
            assert turns.remove(step) == (step in waiting)
            waiting.discard(step)
        assert len(turns) == len(waiting)
    assert set(drain(turns)) == waiting
    with pytest.raises(IndexError):
        turns.pop()


def test_a_lower_priority_value_is_earlier() -> None:
    order = served(*(Claim(priority=priority) for priority in (0, 5, -1, 0, -7)))
    assert order == [4, 2, 0, 3, 1]


def test_a_priority_moves_no_other_tenant() -> None:
    order = served(Claim("a"), Claim("a"), Claim("b", priority=-9), Claim("b", priority=-9))
    assert order == [0, 2, 1, 3]


def test_what_may_be_shed_comes_last() -> None:
    assert served(Claim(may_shed=True, priority=-9), Claim(priority=9), Claim()) == [2, 1, 0]


def test_sessions_of_a_tenant_share_its_work() -> None:
    flood = [Claim("a", session="flood", cost=2.0)] * 4
    assert served(*flood, Claim("a", session="s"), Claim("a", session="s")) == [0, 4, 5, 1, 2, 3]


@given(costs, st.integers(1, 5))
def test_later_priorities_get_their_share(cost: float, num_later: int) -> None:
    turns: Turns[int] = Turns()
    work = {"first": 0.0, "later": 0.0}
    number = 0
    for number in range(num_later):
        turns.push(Claim(cost=cost, priority=1 + number), number)
    for number in range(num_later, 200):
        turns.push(Claim(cost=1.0), number)
        item = turns.pop()
        work["later" if item < num_later else "first"] += cost if item < num_later else 1.0
        if item < num_later:
            assert work["later"] <= LATER_SHARE * sum(work.values()) + cost
            turns.push(Claim(cost=cost, priority=1 + item), item)
    assert work["later"] >= LATER_SHARE * sum(work.values()) - cost - 1.0


def test_of_the_later_priorities_the_oldest_request_is_first() -> None:
    turns: Turns[int] = Turns()
    turns.push(Claim(priority=9), -1)
    order = []
    for number in range(40):
        turns.push(Claim(), number)
        turns.push(Claim(priority=5), 1000 + number)
        order.append(turns.pop())
    assert [item for item in order if not 0 <= item < 1000][:2] == [-1, 1000]


def test_a_flood_refuses_only_itself() -> None:
    turns: Turns[int] = Turns()
    for number in range(10):
        turns.push(Claim("flood"), number)
    for number in range(10, 13):
        turns.push(Claim("steady"), number)
    assert turns.last() == 9
    turns.push(Claim("heavy", weight=100.0, cost=50.0), 13)  # half of its share of one request
    assert turns.last() == 9
    turns.push(Claim("large", cost=50.0), 14)
    assert turns.last() == 14
    turns.push(Claim("steady", may_shed=True), 15)
    assert turns.last() == 15


def test_of_a_tenant_its_longest_session_of_the_last_priority_is_refused() -> None:
    turns: Turns[int] = Turns()
    for number, (session, priority) in enumerate(
        [("s", 1), ("t", 1), ("t", 1), ("u", 0), ("u", 0), ("u", 0), ("s", 1)]
    ):
        turns.push(Claim(session=session, priority=priority, cost=1 + (session == "t")), number)
    assert turns.last() == 2


def test_says_what_is_ahead_of_a_priority() -> None:
    turns: Turns[int] = Turns()
    for number in range(4):
        turns.push(Claim("a", cost=2.0), number)
    turns.push(Claim("a", cost=16.0, priority=3), 9)
    assert turns.cost_ahead(Claim("a")) == 8.0
    assert turns.cost_ahead(Claim("a", priority=-1)) == 0.0
    assert turns.cost_ahead(Claim("a", session="s")) == 0.0
    assert turns.cost_ahead(Claim("a", priority=4)) == 24.0
    assert turns.cost_ahead(Claim("b")) == 0.0


def test_a_long_answer_counts_for_its_tenant() -> None:
    turns: Turns[int] = Turns()
    turns.push(Claim("b"), 0)
    turns.settle(Claim("a", cost=1.0), 6.0)
    for number in range(1, 7):
        turns.push(Claim("b"), number)
    turns.push(Claim("a"), 9)
    assert drain(turns).index(9) in (5, 6)
    turns.settle(Claim("a", cost=100.0), 0.0)  # no more than what it has
    turns.push(Claim("b"), 1)
    turns.push(Claim("a"), 2)
    assert set(drain(turns)) == {1, 2}


def test_a_long_answer_counts_for_its_session() -> None:
    turns: Turns[int] = Turns()
    for number in range(3):
        turns.push(Claim(session="long"), number)
    for number in range(3, 6):
        turns.push(Claim(session="short"), number)
    assert turns.pop() == 0
    turns.settle(Claim(session="long"), 3.0)
    assert drain(turns) == [3, 4, 5, 1, 2]

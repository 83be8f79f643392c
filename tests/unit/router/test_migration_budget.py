from __future__ import annotations

from tandem.router.request.migration_budget import MIGRATIONS_MIN, MigrationBudget


def test_few_requests_may_still_move() -> None:
    budget = MigrationBudget()
    assert [budget.take(5.0) for _ in range(MIGRATIONS_MIN + 2)] == [True] * MIGRATIONS_MIN + [
        False
    ] * 2


def test_a_crash_moves_all_that_are_open_once() -> None:
    budget = MigrationBudget()
    for _ in range(200):
        budget.begin()
    assert all(budget.take(10.0) for _ in range(200))
    assert not budget.take(69.0)
    assert budget.take(70.5), "a minute later it is forgotten"


def test_requests_that_ended_count_for_a_minute() -> None:
    budget = MigrationBudget()
    for second in range(40):
        budget.begin()
        budget.end(float(second))
    assert sum(budget.take(40.0) for _ in range(100)) == 40
    late = MigrationBudget()
    for second in range(40):
        late.begin()
        late.end(float(second))
    assert sum(late.take(85.0) for _ in range(100)) == 14, "those of the last minute"


def test_what_is_older_is_not_kept_though_nobody_moves() -> None:
    budget = MigrationBudget()
    for second in range(100_000):
        budget.begin()
        budget.end(float(second))
    assert len(budget._ended._by_second) <= 61

from __future__ import annotations

from dataclasses import replace

from tandem.router.placement.roster import Roster
from tests.unit.router.test_placement import worker


def test_news_of_a_worker_replaces_what_was_known_and_a_loan_changes_its_pool() -> None:
    roster = Roster([worker("a"), worker("b", "prefill"), worker("c")])
    assert list(roster.pool("decode")) == ["a", "c"]
    busy = worker("c", num_running=3)
    roster.put(busy)
    assert roster.by_id["c"] is busy
    assert list(roster.pool("decode")) == ["a", "c"]
    roster.put(replace(busy, role="prefill"))
    assert list(roster.pool("decode")) == ["a"]
    assert list(roster.pool("prefill")) == ["b", "c"]
    assert list(roster.pool("router")) == []


def test_a_worker_that_left_is_in_no_pool() -> None:
    roster = Roster([worker("a"), worker("b", "prefill"), worker("c")])
    roster.remove("a")
    roster.remove("never")
    assert (list(roster.pool("decode")), list(roster.pool("prefill"))) == (["c"], ["b"])
    assert list(roster.by_id) == ["b", "c"]
    roster.put(worker("a"))
    assert list(roster.pool("decode")) == ["c", "a"]

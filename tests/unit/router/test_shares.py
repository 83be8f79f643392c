from __future__ import annotations

from random import Random

import pytest

from tandem.common.perf_model.rates import PrefillRate, WorkerRates
from tandem.router.placement.choose import SHARE_EXCESS, Roster, Work, choose
from tandem.router.placement.shares import REBASE_S, Shares
from tests.unit.router.test_placement import worker

TOKEN = WorkerRates(PrefillRate(0.0, 1e-3, 0.0), measured=True)


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_hot_prefix_takes_no_worker_over_the_mean_its_excess_and_one_request(role: str) -> None:
    names = [f"w{n}" for n in range(5)]
    matches = {"w0": 60}
    given = dict.fromkeys(names, 0.0)
    rng = Random(0)
    for _ in range(2000):
        workers = [worker(n, role, rates=TOKEN, prefill_share=given[n]) for n in names]
        if role == "prefill":
            workers.append(worker("d", rates=TOKEN))
        placement = choose(Work(1000), Roster(workers), matches, rng)
        assert placement is not None
        chosen = (*placement.prefill_candidates, placement.decode)[0]
        given[chosen.worker_id] += 0.04 if chosen.worker_id == "w0" else 1.0
        mean = sum(given.values()) / len(names)
        assert max(given.values()) <= (1 + SHARE_EXCESS) * mean + 1.0
    assert given["w0"] > 10


def test_one_conversation_stays_where_its_blocks_are() -> None:
    given = {"a": 0.0, "b": 0.0}
    matches: dict[str, int] = {}
    where = set()
    for turn in range(1, 30):
        workers = [worker(n, rates=TOKEN, prefill_share=given[n]) for n in given]
        placement = choose(Work(1600 * turn), Roster(workers), matches, Random(turn))
        assert placement is not None
        name = placement.decode.worker_id
        given[name] += 1.6
        matches = {name: 100 * turn}
        where.add(name)
    assert len(where) == 1


def test_after_days_shares_are_new_numbers_in_the_same_proportion() -> None:
    shares = Shares()
    for name, seconds in (("a", 1.0), ("b", 3.0)):
        shares.join(name, 0.0)
        shares.sent(name, seconds, 0.9 * REBASE_S)
    assert not shares.rebase(0.95 * REBASE_S)
    before = shares.share("b") / shares.second_weight(1.1 * REBASE_S)
    assert shares.rebase(1.1 * REBASE_S)
    assert shares.second_weight(1.1 * REBASE_S) == 1.0
    assert shares.share("b") == pytest.approx(before)
    assert shares.share("b") == pytest.approx(3 * shares.share("a"))
    shares.leave("a")
    assert not shares.rebase(1.2 * REBASE_S)


def test_a_pause_of_many_days_leaves_no_share() -> None:
    shares = Shares()
    shares.join("a", 0.0)
    shares.sent("a", 1.0, 10.0)
    week_s = 7 * 86_400.0
    assert shares.rebase(week_s)
    assert shares.share("a") == 0.0
    shares.sent("a", 2.0, week_s)
    assert shares.share("a") == 2.0


def test_a_share_says_how_busy_a_worker_has_been() -> None:
    shares = Shares()
    shares.join("half", 0.0)
    assert shares.full_share(0.0) == 0.0
    for second in range(4 * int(REBASE_S)):
        shares.rebase(second)
        if second % 10 < 5:
            shares.sent("half", 1.0, second)
        if second % 50_000 == 100:
            busy = shares.share("half") / shares.full_share(second)
            assert busy == pytest.approx(0.5, abs=0.03)

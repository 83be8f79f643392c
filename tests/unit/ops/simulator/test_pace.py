from __future__ import annotations

import pytest

from tandem.common.perf_model.rates import PrefillRate, WorkerRates
from tandem.ops.simulator.pace import Paces, paced
from tandem.router.placement.shares import HALF_LIFE_S, Shares

TOKEN = WorkerRates(PrefillRate(0.0, 1e-3, 0.0), measured=True)


def join(worker_id: str, shares: Shares, paces: Paces) -> None:
    shares.join(worker_id, 0.0)
    paces.join(worker_id)


def test_the_pace_and_the_share_are_learned_from_first_tokens() -> None:
    shares = Shares()
    paces = Paces(shares)
    join("slow", shares, paces)
    for n in range(40):
        sent = paces.sent("slow", 1.0, 10.0 * n)
        paces.first_token(sent, "slow", 10.0 * n + 1.3)
    assert paces.of("slow") == pytest.approx(1.3, rel=0.01)
    assert paced(TOKEN, paces.of("slow")).prefill.seconds(100) == pytest.approx(0.13, rel=0.01)
    given_s = sum(1.3 * 2.0 ** (-(391.3 - 10 * n - 1.3) / HALF_LIFE_S) for n in range(40))
    assert shares.share("slow") / shares.second_weight(391.3) == pytest.approx(given_s)


def test_of_two_in_a_queue_each_counts_for_its_own_time() -> None:
    shares = Shares()
    paces = Paces(shares)
    join("w", shares, paces)
    sent = [paces.sent("w", 1.0, 0.0) for _ in range(2)]
    assert shares.share("w") == 2.0
    for n, one in enumerate(sent):
        paces.first_token(one, "w", 1.0 + n)
    assert paces.of("w") == pytest.approx(1.0)


def test_who_was_chosen_and_did_not_compute_it_has_no_share_of_it() -> None:
    shares = Shares()
    paces = Paces(shares)
    join("chosen", shares, paces)
    join("other", shares, paces)
    paces.first_token(paces.sent("chosen", 1.0, 0.0), "other", 2.0)
    assert shares.share("chosen") == 0.0
    assert shares.share("other") == 2.0 * shares.second_weight(2.0)
    assert paces.of("other") == 1.0

"""The prefill worker that an endpoint picker wants is the first candidate, if it can serve."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tandem.router.placement.choose import Work, choose
from tandem.router.placement.costs import PrefixHolder
from tests.unit.router.test_placement import MEASURED, worker


def test_the_wanted_prefill_worker_is_the_first_candidate_whatever_it_costs() -> None:
    """An endpoint picker chose it by the same costs a moment before."""
    holder = worker("has", "prefill", rates=MEASURED)
    busy = worker("busy", "prefill", rates=MEASURED, queued_tokens=50_000)
    workers = [worker("d", rates=MEASURED), holder, busy]
    for seed in range(20):
        usual = choose(Work(4000), workers, {"has": 200}, Random(seed))
        wanted = choose(Work(4000), workers, {"has": 200}, Random(seed), required_prefill="busy")
        assert usual is not None
        assert wanted is not None
        assert usual.prefill_candidates == (holder, busy)
        assert wanted.prefill_candidates == (busy, holder)
        assert wanted.prefill_worker is busy
        assert wanted.prefix_holders == (PrefixHolder(holder, 200),)
        assert wanted.tokens_missing == 4000


@pytest.mark.parametrize("gone", [{"state": "draining"}, {"reachable": False}, {"role": "decode"}])
def test_a_wanted_prefill_worker_that_cannot_serve_is_not_asked(gone: dict[str, object]) -> None:
    well = worker("p", "prefill")
    wanted = worker("w", "prefill")
    workers = [worker("d"), well, replace(wanted, **gone)]  # type: ignore[arg-type]
    placement = choose(Work(4000), workers, {}, Random(1), required_prefill="w")
    assert placement is not None
    assert placement.prefill_candidates == (well,)


def test_of_many_workers_the_wanted_one_is_found() -> None:
    prefills = [worker(f"p{i}", "prefill", rates=MEASURED) for i in range(300)]
    for seed in range(20):
        placement = choose(
            Work(1000), [worker("d"), *prefills], {}, Random(seed), required_prefill="p77"
        )
        assert placement is not None
        assert placement.prefill_candidates[0].worker_id == "p77"

from __future__ import annotations

from random import Random

import pytest

from tandem.router.placement.choose import Work, choose
from tandem.router.placement.reasons import asks, reason_of
from tests.unit.router.snapshots import snapshot as worker


@pytest.mark.parametrize(
    ("queued", "matches", "expected"),
    [
        (0, {}, "load"),
        (0, {"gone": 20}, "load"),
        (0, {"d0": 20}, "prefix"),
        (0, {"d0": 20, "d1": 2}, "prefix"),
        (10_000, {"d0": 20}, "load_over_prefix"),
        (10_000, {"d0": 20, "d1": 2}, "load_over_prefix"),
        (10_000, {"d0": 20, "d1": 20}, "prefix"),
    ],
)
@pytest.mark.parametrize("prefill", [False, True])
def test_says_what_decided(
    queued: int, matches: dict[str, int], expected: str, prefill: bool
) -> None:
    workers = [worker("d0", queued_tokens=queued), worker("d1")]
    if prefill:
        workers += [worker("p", "prefill", queued_tokens=100_000)]
    placement = choose(Work(1000), workers, matches, Random(0))
    assert placement is not None
    assert reason_of(Work(1000), placement, matches) == expected


def test_the_prefill_worker_that_has_it_counts() -> None:
    placement = choose(Work(1000), [worker("d"), worker("p", "prefill")], {"p": 20}, Random(0))
    assert placement is not None
    assert reason_of(Work(1000), placement, {"p": 20}) == "prefix"


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("yes", True), ("0", False)])
def test_who_asks(value: str, expected: bool) -> None:
    assert asks(value) is expected
    assert not asks(None)
    assert not asks(" False ")

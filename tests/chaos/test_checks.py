"""Tests that the checks of a chaos run detect what they should."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any, Literal

import pytest

from tests.chaos import checks
from tests.chaos import load as load_module
from tests.chaos.checks import check_counted, wrong_outcomes
from tests.chaos.load import Load, Outcome, Prompt, Request, RouterLife


class StubCluster:
    """A cluster with addresses on which nothing listens."""

    url = admin_url = "http://127.0.0.1:9"
    grpc_port = 9

    def records(self) -> dict[str, dict[str, Any]]:
        return {}


REQUEST = Request(0, Prompt([1, 2], [5, 6, 7, 8]), max_tokens=3, api="http", leaves_after_s=None)


@pytest.mark.parametrize(
    ("token_ids", "ends", "cut_short", "problem"),
    [
        ([5, 6, 7], ["length"], "", ""),
        ([5, 6], [], "left", ""),
        ([], [], "left", ""),
        ([5, 6, 9], ["length"], "", "WRONG TOKENS"),
        ([5, 9], [], "left", "WRONG TOKENS"),
        ([5, 6, 7, 8], ["length"], "", "WRONG TOKENS"),
        ([5, 6], ["length"], "", "too few"),
        ([5, 6, 7], [], "", "neither finished"),
        ([5, 6, 7], ["length", "worker_lost"], "", "neither finished"),
        ([5], ["worker_lost"], "", "neither finished"),
        ([5, 6, 7], [], "hung", "neither finished"),
        ([5, 6], ["UNAVAILABLE"], "router lost", ""),
        ([5, 9], ["UNAVAILABLE"], "router lost", "WRONG TOKENS"),
    ],
)
def test_an_outcome_is_right_or_named(
    token_ids: list[int],
    ends: list[str],
    cut_short: Literal["", "left", "hung", "router lost"],
    problem: str,
) -> None:
    found = wrong_outcomes([Outcome(REQUEST, token_ids, ends, cut_short)])
    assert (problem in found[0]) if problem else not found


async def test_a_stream_that_ends_with_its_router_is_asked_for_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = RouterLife()
    load = Load(StubCluster(), iter([REQUEST]), num_clients=1, bound_s=9, router=router)

    async def ask(_: object, outcome: Outcome) -> None:
        with contextlib.nullcontext() if outcome.is_retry else router.death():
            outcome.ends.append("length" if outcome.is_retry else "UNAVAILABLE")

    monkeypatch.setattr(load, "_ask", ask)
    await load.run()
    assert [o.kind for o in load.outcomes] == ["router lost", "finished"]


async def test_a_retry_that_fails_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    router = RouterLife()
    load = Load(StubCluster(), iter([REQUEST]), num_clients=1, bound_s=9, router=router)

    async def ask(_: object, outcome: Outcome) -> None:
        with router.death():
            outcome.ends.append("UNAVAILABLE")

    monkeypatch.setattr(load, "_ask", ask)
    await load.run()
    assert [o.kind for o in load.outcomes] == ["router lost", "UNAVAILABLE"]
    assert "neither finished" in wrong_outcomes(load.outcomes)[0]


@pytest.mark.parametrize("dies", [False, True])
async def test_a_router_that_lives_is_asked_what_it_heard(
    dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = RouterLife()
    wanted = iter([REQUEST, REQUEST])
    load = Load(StubCluster(), wanted, num_clients=1, bound_s=9, router=router)

    async def ask(_: object, outcome: Outcome) -> None:
        if len(load.outcomes) == 0:
            outcome.cut_short = "left"
            return
        with router.death() if dies else contextlib.nullcontext():
            outcome.ends.append("length")

    async def was_heard(_: object, __: str) -> bool:
        return False

    monkeypatch.setattr(load, "_ask", ask)
    monkeypatch.setattr(load_module.HttpApi, "was_heard", was_heard)
    monkeypatch.setattr(load_module.GrpcApi, "was_heard", was_heard)
    await load.run()
    assert [o.was_heard for o in load.outcomes] == [dies, True]


@pytest.mark.parametrize(("was_heard", "num_counted"), [(True, 2), (False, 1)])
def test_a_request_that_was_heard_is_missed_from_the_count(
    was_heard: bool, num_counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = Outcome(REQUEST, cut_short="left", was_heard=was_heard)
    outcomes = [Outcome(REQUEST, [5, 6, 7], ["length"]), left]
    for counted in (1, 2):
        monkeypatch.setattr(checks, "router_outcomes", lambda _, n=counted: Counter(length=7 + n))
        if counted == num_counted:
            check_counted(None, 7, outcomes)  # type: ignore[arg-type]
        else:
            with pytest.raises(AssertionError, match="that were heard"):
                check_counted(None, 7, outcomes)  # type: ignore[arg-type]

from __future__ import annotations

from random import Random

import msgspec
import pytest

from tandem.common.units import format_ms
from tandem.router.placement.choose import Work, choose
from tandem.router.placement.reasons import asks, reason_of, sentence_of
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
    assert reason_of(Work(1000), placement) == expected


def test_the_prefill_worker_that_has_it_counts() -> None:
    placement = choose(Work(1000), [worker("d"), worker("p", "prefill")], {"p": 20}, Random(0))
    assert placement is not None
    assert reason_of(Work(1000), placement) == "prefix"


@pytest.mark.parametrize(
    ("queued", "matches", "told"),
    [
        (0, {}, "No worker held a part of the prompt, so the load decided. d"),
        (
            0,
            {"d0": 20},
            "d0 already held 320 of the 1,000 prompt tokens in whole blocks, and no worker held",
        ),
        (10_000, {"d0": 20}, "A worker that held more of the prompt was too busy. d1's predicted"),
    ],
)
def test_the_reason_is_a_sentence(queued: int, matches: dict[str, int], told: str) -> None:
    workers = [worker("d0", queued_tokens=queued), worker("d1")]
    work = Work(1000)
    placement = choose(work, workers, matches, Random(0))
    assert placement is not None
    sentence = sentence_of(reason_of(work, placement), placement)
    assert sentence.startswith(told)
    assert "with 0 decoding, 0 in prefill and 0 queued. Next best was d" in sentence
    other = placement.runner_up
    assert other is not None
    assert other.worker.worker_id != placement.decode.worker_id
    told = f"{other.worker.worker_id}: {format_ms(1000 * other.cost_s)}, with"
    assert sentence.endswith(f"{told} {other.reused.num_tokens:,} tokens held.")


@pytest.mark.parametrize(
    ("queued", "why"),
    [
        (0, "each, and their predicted delays are about the same."),
        (500, "each, so the shorter predicted delay decided. d1's predicted delay was "),
    ],
)
def test_a_prefix_that_two_workers_hold_is_no_reason(queued: int, why: str) -> None:
    workers = [worker("d0", queued_tokens=queued), worker("d1")]
    matches = {"d0": 20, "d1": 20}
    placement = choose(Work(1000), workers, matches, Random(0))
    assert placement is not None
    sentence = sentence_of(reason_of(Work(1000), placement), placement)
    assert f"already held 320 of the 1,000 prompt tokens in whole blocks {why}" in sentence
    assert "no worker held more" not in sentence
    slower = msgspec.structs.replace(placement.runner_up, cost_s=12.4)
    told = sentence_of("prefix", msgspec.structs.replace(placement, runner_up=slower))
    assert f"Next best was {slower.worker.worker_id}: 12.4 s, with 320 tokens held." in told


def test_the_sentence_names_the_prefill_worker_that_has_the_prefix() -> None:
    work = Work(1000)
    placement = choose(work, [worker("d"), worker("p", "prefill")], {"p": 20}, Random(0))
    assert placement is not None
    assert sentence_of("prefix", placement) == (
        "p already held 320 of the 1,000 prompt tokens in whole blocks, and no worker held more."
        " d was the only decode worker to choose from."
    )


def test_the_delay_at_a_decode_worker_has_no_time_at_a_prefill_worker() -> None:
    work = Work(1000)
    workers = [worker("d0"), worker("d1"), worker("p", "prefill")]
    placement = choose(work, workers, {}, Random(0))
    assert placement is not None
    told = sentence_of(reason_of(work, placement), placement)
    assert "'s predicted delay, without the time at a prefill worker, was " in told


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("yes", True), ("0", False)])
def test_who_asks(value: str, expected: bool) -> None:
    assert asks(value) is expected
    assert not asks(None)
    assert not asks(" False ")

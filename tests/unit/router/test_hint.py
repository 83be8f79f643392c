"""A hint of an endpoint picker is believed as it was signed, for its request, for a time."""

from __future__ import annotations

import pytest

from tandem.router.placement.hint import AGE_MAX_S, PlacementHint, read, sign

HINT = PlacementHint("request-1", 1000.0, "decode-1", "prefill-0")
SIGNED = sign(HINT, "token")


def test_a_hint_is_read_as_it_was_signed() -> None:
    assert read(SIGNED, "token", request_id="request-1", now=1000.0) == HINT


@pytest.mark.parametrize("late_s", [-AGE_MAX_S - 1, AGE_MAX_S + 1])
def test_a_hint_counts_for_a_short_time(late_s: float) -> None:
    assert read(SIGNED, "token", request_id="request-1", now=1000.0 + late_s) is None


def test_a_hint_counts_for_its_request_and_its_cluster() -> None:
    assert read(SIGNED, "token", request_id="request-2", now=1000.0) is None
    assert read(SIGNED, "another", request_id="request-1", now=1000.0) is None


def test_another_placement_under_the_same_signature_is_refused() -> None:
    body, _, signature = sign(PlacementHint("request-1", 1000.0, "decode-0"), "token").partition(
        "."
    )
    assert (
        read(f"{SIGNED.partition('.')[0]}.{signature}", "token", request_id="request-1", now=1000.0)
        is None
    )
    assert read(f"{body}.{signature}", "token", request_id="request-1", now=1000.0) is not None


@pytest.mark.parametrize("value", ["", ".", "x", "ä.ö", "a" * 5000, SIGNED + "0", SIGNED[:-1]])
def test_a_malformed_hint_is_none(value: str) -> None:
    assert read(value, "token", request_id="request-1", now=1000.0) is None

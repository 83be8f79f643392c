"""Sizes and times with units."""

from __future__ import annotations

import pytest

from tandem.common.units import format_size, format_time, parse_size, parse_time


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4294967296", 4 << 30),
        ("4GiB", 4 << 30),
        ("4 gib", 4 << 30),
        ("1.5GiB", 3 << 29),
        ("500MB", 500_000_000),
        ("64KiB", 64 << 10),
        ("2kB", 2000),
        ("1TB", 10**12),
        ("12B", 12),
        ("0", 0),
        ("-1", -1),  # the option's bounds refuse it
    ],
)
def test_a_size_is_a_number_of_bytes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("0.1", 0.1),
        ("90s", 90.0),
        ("5m", 300.0),
        ("250ms", 0.25),
        ("1h30m", 5400.0),
        ("1h 30m", 5400.0),
        ("2d", 172800.0),
        ("1.5h", 5400.0),
    ],
)
def test_a_time_is_a_number_of_seconds(text: str, seconds: float) -> None:
    assert parse_time(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "4XB", "GiB", "4G", "4 Gi B", "-4GiB", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"is not a size; write a number of bytes, or a size such as 500MB"
    ):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "5x", "m", "5m6", "1h-5m", "soon"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"is not a time; write a number of seconds, or a time such as 90s"
    ):
        parse_time(text)


def test_defaults_are_shown_with_units() -> None:
    assert [format_size(size) for size in (0, 1 << 30, 16 << 30, 3 << 20, 1000)] == [
        "0",
        "1GiB",
        "16GiB",
        "3MiB",
        "1000",
    ]
    assert [format_time(time) for time in (0.0, 0.1, 120.0)] == ["0", "0.1s", "120s"]

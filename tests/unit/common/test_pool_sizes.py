from __future__ import annotations

import pytest

from tandem.common.pool_sizes import check_sizes, sizes_in_words
from tandem.errors import BadRequest


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({}, "pool sizes"),
        ([1], "pool sizes"),
        ({"prefil": 1}, "no pool .* pools are router, prefill, decode"),
        ({"prefill": -1}, "integer from 0 to 64"),
        ({"prefill": True}, "integer from 0 to 64"),
        ({"router": 0}, "integer from 1 to 64"),
        ({"decode": 65}, "integer from 0 to 64"),
    ],
)
def test_bad_sizes_are_refused_with_what_is_allowed(sizes: object, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        check_sizes(sizes)


def test_good_sizes_are_taken_as_they_are() -> None:
    assert check_sizes({"prefill": 0, "router": 1}) == {"prefill": 0, "router": 1}


@pytest.mark.parametrize(
    ("sizes", "shown"),
    [
        ([], ""),
        ([("router", 0)], ""),
        ([("decode", 2)], "2 decode"),
        ([("decode", 2), ("prefill", 1)], "2 decode and 1 prefill"),
        ([("decode", 2), ("encode", 3), ("prefill", 1)], "2 decode, 3 encode and 1 prefill"),
    ],
)
def test_sizes_are_shown_in_words(sizes: list[tuple[str, int]], shown: str) -> None:
    assert sizes_in_words(sizes) == shown

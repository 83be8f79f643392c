from __future__ import annotations

import pytest

from tandem.common.pool_sizes import check_sizes
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

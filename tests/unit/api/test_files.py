"""The places of uploads, which tenants share."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tandem.api.routes.files import UploadPlaces
from tandem.errors import TooManyRequests


def take_all(stack: ExitStack, places: UploadPlaces, tenant: str) -> int:
    """Returns how many places the tenant gets."""
    for number in range(100):
        try:
            stack.enter_context(places.place(tenant))
        except TooManyRequests:
            return number
    raise AssertionError("there is no limit")


def test_no_tenant_takes_all_places() -> None:
    places = UploadPlaces(16)
    with ExitStack() as first:
        assert take_all(first, places, "flood") == 8
        for number, most in enumerate((4, 2, 1, 1), start=1):
            assert take_all(first, places, f"later-{number}") == most
        with pytest.raises(TooManyRequests, match="receives 8 of your files and 16 in all"):
            first.enter_context(places.place("flood"))
    with ExitStack() as second:  # all places are free again
        assert take_all(second, places, "flood") == 8

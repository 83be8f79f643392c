from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.common.block_hash import HASH_BYTES
from tandem.errors import BadRequest
from tandem.router.admission.tenants import TENANT_CHARACTERS_MAX, cache_salt, read_tenant


def test_a_header_that_is_not_trusted_is_ignored() -> None:
    assert read_tenant(["acme"], trusted=False) == ""
    assert read_tenant(["a", "b"], trusted=False) == ""
    assert read_tenant(["\n"], trusted=False) == ""


def test_a_trusted_one_names_the_tenant() -> None:
    assert read_tenant([" acme \t"], trusted=True) == "acme"
    assert read_tenant(["acme & sons"], trusted=True) == "acme & sons"
    assert read_tenant([], trusted=True) == ""


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["acme", "other"], "was sent 2 times; send it once"),
        ([""], "must have 1 to 128 printable ASCII characters"),
        ([" \t"], "must have 1 to 128 printable ASCII characters"),
        (["x" * (TENANT_CHARACTERS_MAX + 1)], "must have 1 to 128 printable ASCII characters"),
        (["a\x00b"], "must have 1 to 128 printable ASCII characters"),
        (["acmé"], "must have 1 to 128 printable ASCII characters"),
        # str.strip() would remove each of these and leave another tenant's name.
        *(
            ([f"acme{space}"], "must have 1 to 128 printable ASCII characters")
            for space in "\n\v\f\r\x1c\x85\xa0\u2003\u3000"
        ),
    ],
)
def test_what_names_nobody_clearly_is_refused(values: list[str], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        read_tenant(values, trusted=True)


@given(st.text(min_size=1), st.text(min_size=1))
def test_each_tenant_has_a_salt_that_depends_on_the_secret(one: str, other: str) -> None:
    salt = cache_salt("secret", one)
    assert len(salt) == HASH_BYTES
    assert salt != cache_salt("another secret", one)
    assert (salt == cache_salt("secret", other)) is (one == other)


def test_without_a_tenant_there_is_no_salt() -> None:
    assert cache_salt("secret", "") == b""

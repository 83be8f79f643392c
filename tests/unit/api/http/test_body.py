from __future__ import annotations

import pytest

from tandem.api.http.body import parse_object
from tandem.errors import BadRequest


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"{",
        b'{"a": 1}}',
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": "\xff"}',
        b'{"\xff": 1}',
        b'{"a": "\xed\xa0\x80"}',
        b'{"a": "\\ud800"}',
        b'{"a": "\\ud800x"}',
        b"[]",
        b"5",
        b"null",
        b'"x"',
        b"\x00",
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        '{"a": "x"}'.encode("utf-16"),
    ],
)
def test_what_is_not_a_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest, match="must be"):
        parse_object(body)


def test_a_missing_body_is_called_empty() -> None:
    with pytest.raises(BadRequest, match="it is empty"):
        parse_object(b"")


def test_objects_pass() -> None:
    assert parse_object('{"a": ["ü", 1, 1.5, null, "\\ud83d\\ude42"]}'.encode()) == {
        "a": ["ü", 1, 1.5, None, "🙂"]
    }

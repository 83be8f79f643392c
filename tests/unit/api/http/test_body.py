from __future__ import annotations

import gzip

import pytest

from tandem.api.http.body import Gunzip, parse_object
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
        b'{"a": "\\ud800',
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


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (r"\ud83d", "\ufffd"),
        (r"cut \ud83d", "cut \ufffd"),
        (r"\uDE42 x", "\ufffd x"),
        (r"\ud83d\ud83d\ude42\ude42", "\ufffd🙂\ufffd"),
        (r"\\ud83d \\\ud83d", "\\ud83d \\\ufffd"),
        (r"\ud83d\\ude42", "\ufffd\\ude42"),
    ],
)
def test_half_of_a_character_is_replaced(sent: str, text: str) -> None:
    """Agents in JavaScript send one where they have cut the output of a tool."""
    assert parse_object(f'{{"a": "{sent}"}}'.encode()) == {"a": text}


def test_a_byte_order_mark_is_skipped() -> None:
    assert parse_object(b"\xef\xbb\xbf" + b'{"a": 1}') == {"a": 1}


def gunzipped(data: bytes, size: int) -> bytes:
    """Returns the decompressed bytes of a body that arrives in pieces of `size` bytes."""
    gunzip = Gunzip()
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    body = b"".join(part for piece in pieces for part in gunzip.push(piece))
    gunzip.check_end()
    return body


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
@pytest.mark.parametrize("num_bytes", [0, 1, 65_536, 65_537, 300_001])
def test_a_gzip_body_is_its_decompressed_bytes(num_bytes: int, size: int) -> None:
    text = b"abcdefghij" * 30_001
    text = text[:num_bytes]
    assert gunzipped(gzip.compress(text), size) == text
    # A file of two members, as `cat a.gz b.gz` makes it.
    assert gunzipped(gzip.compress(text) + gzip.compress(b"more"), size) == text + b"more"
    # Some programs fill up the last block of a tape with zeros, and gzip ignores them.
    assert gunzipped(gzip.compress(text) + bytes(10), size) == text


def test_a_damaged_gzip_body_is_refused() -> None:
    good = gzip.compress(b'{"a": 1}' * 100)
    for bad, why in (
        (good[:-1], "ends too early"),
        (good + b"more", "not valid gzip"),
        (b'{"a": 1}', "not valid gzip"),
        (gzip.compress(b"") * 65, "more than 64 members"),
    ):
        with pytest.raises(BadRequest, match=why):
            gunzipped(bad, 1 << 20)


def test_a_small_body_makes_only_as_many_bytes_as_are_taken() -> None:
    bomb = gzip.compress(bytes(100 << 20))
    taken = 0
    for piece in Gunzip().push(bomb):
        taken += len(piece)
        if taken > 1 << 20:
            break
    assert taken <= (1 << 20) + (64 << 10)

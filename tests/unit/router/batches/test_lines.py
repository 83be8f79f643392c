"""Lines of input files, and of files of results."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.net.files.folder import FolderStore
from tandem.net.files.store import PIECE_BYTES
from tandem.router.batches.lines import (
    LINES_MAX,
    InputLine,
    Validator,
    parse_line,
    read_lines,
    result_line,
    unanswered_line,
)

ENDPOINT = "/v1/completions"


def encoded(**changes: object) -> bytes:
    line = {"custom_id": "a", "method": "POST", "url": ENDPOINT, "body": {"prompt": "x"}}
    return json.dumps({**line, **changes}).encode()


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"\xff", "invalid_json_line", None),
        (b'{"a":' * 1800, "invalid_json_line", None),
        (b"3", "invalid_json_line", None),
        (b"{}", "missing_required_parameter", "custom_id"),
        (encoded(custom_id=1), "invalid_type", "custom_id"),
        (encoded(custom_id=""), "invalid_custom_id", "custom_id"),
        (encoded(custom_id="x" * 513), "invalid_custom_id", "custom_id"),
        (encoded(method="GET"), "invalid_method", "method"),
        (encoded(url="/v1/embeddings"), "invalid_url", "url"),
        (encoded(body=[]), "invalid_type", "body"),
        (encoded(body={"stream": True}), "invalid_stream", "body.stream"),
        (encoded(body={"prompt": "x" * 20_000}), "line_too_large", None),
    ],
)
def test_faults(line: bytes, code: str, param: str | None) -> None:
    validator = Validator(ENDPOINT, 4000)
    validator.check(line, 7)
    validator.end()
    (error,) = validator.errors
    assert (error.code, error.param, error.line) == (code, param, 7)


def test_files_as_a_whole() -> None:
    validator = Validator(ENDPOINT, 1000)
    for number in range(LINES_MAX + 1):
        assert not validator.is_over
        validator.check(encoded(custom_id=f"{number}"), number)
    assert validator.is_over
    validator.end()
    assert [error.code for error in validator.errors] == ["too_many_lines"]
    twice = Validator(ENDPOINT, 1000)
    for number in range(100):
        twice.check(encoded(), number + 1)
    assert [error.line for error in twice.errors] == list(range(2, 22))


def test_results_have_no_line_breaks() -> None:
    """Clients split the files of results with `splitlines`."""
    text = "a\u2028b\u2029c\x85d"
    answer = json.dumps({"text": text}, ensure_ascii=False).encode()
    made = result_line(
        InputLine(text, {}), request_id="r", status=200, body=answer, batch_line_id="b"
    )
    left = unanswered_line(text, batch_line_id="b", code="c", message="m")
    first, second = (made + left).decode().splitlines()
    assert json.loads(first)["response"]["body"]["text"] == text
    assert [json.loads(each)["custom_id"] for each in (first, second)] == [text, text]


def test_results_are_json() -> None:
    line = InputLine('a"\n', {})
    made = result_line(
        line, request_id="r", status=200, body=b'{"text":"\\n"}', batch_line_id="batch_req_r"
    )
    assert made.count(b"\n") == 1
    assert json.loads(made) == {
        "id": "batch_req_r",
        "custom_id": 'a"\n',
        "response": {"status_code": 200, "request_id": "r", "body": {"text": "\n"}},
        "error": None,
    }
    left = unanswered_line("b", batch_line_id="batch_req_s", code="batch_expired", message="m")
    assert json.loads(left)["error"] == {"code": "batch_expired", "message": "m"}
    assert parse_line(encoded(custom_id="c"), ENDPOINT).custom_id == "c"
    assert parse_line(b"\xef\xbb\xbf" + encoded(custom_id="c"), ENDPOINT).custom_id == "c"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([b"", b" ", b"x", b"\r", b"abc", b"y" * 60]), max_size=30))
def test_lines_do_not_depend_on_pieces(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]
) -> None:
    data = b"\n".join(parts)

    class SmallReads(FolderStore):
        async def read(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
            return await super().read(name, start, 7 if length == PIECE_BYTES else length)

    async def read() -> list[tuple[int, bytes]]:
        store = SmallReads(tmp_path_factory.mktemp("files") / "files", "files-url")
        await store.put("f", data)
        return [each async for each in read_lines(store, "f", 1000)]

    expected = [(n, part.strip()) for n, part in enumerate(parts, start=1) if part.strip()]
    assert asyncio.run(read()) == expected


async def test_millions_of_empty_lines(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "files", "files-url")
    await store.put("f", b"\n" * (8 * PIECE_BYTES) + b"a\n")
    began = time.process_time()
    found = [each async for each in read_lines(store, "f", 1000)]
    assert found == [(8 * PIECE_BYTES + 1, b"a")]
    assert time.process_time() - began < 0.6  # a step for each line takes many times as long


async def test_a_long_line_is_cut(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "files", "files-url")
    await store.put("f", b"a\n" + b"x" * (3 * PIECE_BYTES) + b"\nb\n")
    found = [(number, len(line)) async for number, line in read_lines(store, "f", 1000)]
    assert (found[0], found[2]) == ((1, 1), (3, 1))
    assert 1000 < found[1][1] <= 2 * PIECE_BYTES
    with pytest.raises(FileNotFoundError):
        _ = [line async for line in read_lines(store, "missing", 1000)]

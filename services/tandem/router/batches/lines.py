"""The lines of a batch's input file, and those of its output and error files. Does no I/O, except
that `read_lines` reads the file store.

An input line is {"custom_id", "method", "url", "body"}. Empty lines do not count. The formats are
those of OpenAI's Batch API.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from tandem.common.line_breaks import without_breaks
from tandem.common.surrogates import decode_json
from tandem.net.files.store import PIECE_BYTES, FileStore
from tandem.router.batches.records import LineError

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
LINES_MAX = 50_000  # of one batch
CUSTOM_ID_CHARACTERS_MAX = 512
# Tandem's own envelope around a body: a line may have this many bytes more than a body.
_ENVELOPE_BYTES = 8 << 10
_ERRORS_MAX = 20  # a client learns of the first faults only
_DIGEST_BYTES = 16
_LINE = re.compile(rb"[^\s][^\n]*")


@dataclass(frozen=True, slots=True)
class InputLine:
    custom_id: str
    body: dict[str, Any]


class _Fault(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


def parse_line(data: bytes, endpoint: str) -> InputLine:
    """Parses a line of an input file that `Validator` has accepted. Raises ValueError."""
    try:
        return _parse(data, endpoint)
    except _Fault as fault:
        raise ValueError(fault.message) from None


class Validator:
    """Checks all lines of an input file, one after the other."""

    def __init__(self, endpoint: str, body_bytes_max: int) -> None:
        self._endpoint = endpoint
        self._line_bytes_max = body_bytes_max + _ENVELOPE_BYTES
        self._seen: set[bytes] = set()  # digests of the custom_ids
        self.num_lines = 0
        self.errors: list[LineError] = []

    def check(self, data: bytes, number: int) -> None:
        """Checks a line. `number` is its place in the file, from 1 on, and counts empty lines."""
        self.num_lines += 1
        try:
            if len(data) > self._line_bytes_max:
                raise _Fault(
                    "line_too_large", f"a line may have at most {self._line_bytes_max} bytes"
                )
            line = _parse(data, self._endpoint)
            digest = blake2b(line.custom_id.encode(), digest_size=_DIGEST_BYTES).digest()
            if digest in self._seen:
                raise _Fault(
                    "duplicate_custom_id",
                    f"the custom_id {line.custom_id[:80]!r} is used by an earlier line; each line "
                    "needs one of its own",
                    "custom_id",
                )
            self._seen.add(digest)
        except _Fault as fault:
            if len(self.errors) < _ERRORS_MAX:
                self.errors.append(LineError(fault.code, fault.message, number, fault.param))

    def end(self) -> None:
        """Checks the file as a whole."""
        if not self.num_lines:
            self.errors.append(LineError("empty_file", "the input file has no lines"))
        if self.num_lines > LINES_MAX:
            message = f"the input file has {self.num_lines} lines, and may have {LINES_MAX}"
            self.errors = [LineError("too_many_lines", message)]

    @property
    def is_over(self) -> bool:
        """True if further lines need no check."""
        return self.num_lines > LINES_MAX


def _parse(data: bytes, endpoint: str) -> InputLine:
    try:
        # msgspec checks UTF-8 only in the strings that it decodes. Some editors write a byte order
        # mark at the beginning of a file.
        line = decode_json(data.decode("utf-8-sig"))
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError):
        raise _Fault("invalid_json_line", "the line is not valid JSON") from None
    if not isinstance(line, dict):
        raise _Fault("invalid_json_line", "the line must be a JSON object")
    for name, kind in (("custom_id", str), ("method", str), ("url", str), ("body", dict)):
        if name not in line:
            raise _Fault("missing_required_parameter", f"the line has no {name}", name)
        if not isinstance(line[name], kind):
            form = "a string" if kind is str else "a JSON object"
            raise _Fault("invalid_type", f"{name} must be {form}", name)
    if not 1 <= len(line["custom_id"]) <= CUSTOM_ID_CHARACTERS_MAX:
        raise _Fault(
            "invalid_custom_id",
            f"custom_id must have 1 to {CUSTOM_ID_CHARACTERS_MAX} characters",
            "custom_id",
        )
    if line["method"] != "POST":
        raise _Fault(
            "invalid_method", f"method must be POST, not {line['method'][:20]!r}", "method"
        )
    if line["url"] != endpoint:
        raise _Fault(
            "invalid_url",
            f"url must be {endpoint}, the endpoint of the batch, not {line['url'][:80]!r}",
            "url",
        )
    if line["body"].get("stream"):
        raise _Fault("invalid_stream", "a line of a batch cannot be streamed", "body.stream")
    return InputLine(line["custom_id"], line["body"])


async def read_lines(
    store: FileStore, name: str, line_bytes_max: int
) -> AsyncGenerator[tuple[int, bytes], None]:
    """Yields the lines of a file that are not empty, each with its place from 1 on. A line that is
    longer than `line_bytes_max` is yielded as its beginning, which is longer than that, too. Raises
    FileNotFoundError if there is no such file."""
    held = bytearray()  # the line whose end has not been read
    number = 1  # of that line
    start = 0
    while (piece := await store.read(name, start, PIECE_BYTES)) is not None:
        start += len(piece)
        end, newline, others = piece.partition(b"\n")
        if len(held) <= line_bytes_max:
            held += end
        if newline or not piece:
            if line := bytes(held).strip():
                yield number, line
            held.clear()
        if not piece:
            return
        if not newline:
            continue
        whole, newline, rest = others.rpartition(b"\n")
        number += 1
        at = 0
        # The search passes over empty lines, because a file may have millions of them.
        for found in _LINE.finditer(whole):
            number += whole.count(b"\n", at, found.start())
            at = found.start()
            yield number, found[0].rstrip()
        number += whole.count(b"\n", at) + len(newline)
        held += rest
    raise FileNotFoundError(name)


def result_line(
    line: InputLine, *, request_id: str, status: int, body: bytes, batch_line_id: str
) -> bytes:
    """Returns the line of the output file, or of the error file for a status that is not 200."""
    answered = msgspec.json.encode({"status_code": status, "request_id": request_id})
    whole = b"".join(
        (
            msgspec.json.encode({"id": batch_line_id, "custom_id": line.custom_id})[:-1],
            b',"response":',
            answered[:-1],
            b',"body":',
            body,
            b'},"error":null}\n',
        )
    )
    return without_breaks(whole)


def unanswered_line(custom_id: str, *, batch_line_id: str, code: str, message: str) -> bytes:
    """Returns the line of the error file for a line that did not run."""
    error = {"code": code, "message": message}
    line = {"id": batch_line_id, "custom_id": custom_id, "response": None, "error": error}
    return without_breaks(msgspec.json.encode(line)) + b"\n"

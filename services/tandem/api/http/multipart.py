"""Parses a body of the type multipart/form-data (RFC 7578) as it arrives.

Only headers of parts are held in memory. The bytes of a part are passed on in pieces.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import unquote

from tandem.errors import BadRequest

PARTS_MAX = 16
HEADER_BYTES_MAX = 8 << 10  # headers of one part
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_PARAMETER = re.compile(r';\s*(name|filename|filename\*)\s*=\s*("(?:\\.|[^"\\])*"|[^;\s]*)')


@dataclass(frozen=True, slots=True)
class Part:
    """The beginning of a part."""

    name: str
    filename: str | None


class Multipart:
    """Splits a body into parts. `push` yields a `Part` at the beginning of each part, and then the
    bytes of the part in pieces."""

    def __init__(self, content_type: str) -> None:
        """Raises BadRequest if the header `Content-Type` has another type or no boundary."""
        kind, _, options = content_type.partition(";")
        found = _BOUNDARY.search(options)
        if kind.strip().lower() != "multipart/form-data" or found is None:
            raise BadRequest(
                "send the file as multipart/form-data with a boundary, not as "
                f"{content_type[:100] or 'nothing'!r}"
            )
        self._delimiter = b"\r\n--" + (found[1] or found[2]).encode("latin-1", "replace")
        # The first delimiter has no line before it if there is no preamble.
        self._held = bytearray(b"\r\n")
        self._state = "preamble"
        self._num_parts = 0

    def push(self, data: bytes) -> Iterator[Part | bytes]:
        """Takes the next bytes of the body. Raises BadRequest if the body is malformed."""
        self._held += data
        while True:
            match self._state:
                case "preamble" | "data":
                    at = self._held.find(self._delimiter)
                    # The end of the bytes may be the beginning of a delimiter.
                    end = at if at >= 0 else max(0, len(self._held) - len(self._delimiter) + 1)
                    if self._state == "data" and end:
                        yield bytes(self._held[:end])
                    if at < 0:
                        del self._held[:end]
                        return
                    del self._held[: at + len(self._delimiter)]
                    self._state = "delimiter"
                case "delimiter":
                    if len(self._held) < 2:
                        return
                    if self._held.startswith(b"--"):
                        self._state = "end"
                    elif (at := self._held.find(b"\r\n")) >= 0 and not self._held[:at].strip(
                        b" \t"
                    ):
                        del self._held[:at]  # the line's end may be that of empty headers
                        self._state = "headers"
                    elif at >= 0 or len(self._held) > HEADER_BYTES_MAX:
                        raise BadRequest("the multipart body has a malformed boundary")
                    else:
                        return
                case "headers":
                    at = self._held.find(b"\r\n\r\n")
                    if (len(self._held) if at < 0 else at) > HEADER_BYTES_MAX:
                        raise BadRequest(f"the headers of a part may have {HEADER_BYTES_MAX} bytes")
                    if at < 0:
                        return
                    self._num_parts += 1
                    if self._num_parts > PARTS_MAX:
                        raise BadRequest(f"the body may have {PARTS_MAX} parts")
                    yield _part(bytes(self._held[:at]))
                    # The last line's end belongs to the delimiter if the part is empty.
                    del self._held[: at + 2]
                    self._state = "begin"
                case "begin":
                    if len(self._held) < len(self._delimiter):
                        return
                    if not self._held.startswith(self._delimiter):
                        del self._held[:2]
                    self._state = "data"
                case _:
                    self._held.clear()
                    return

    def check_end(self) -> None:
        """Raises BadRequest if the body ends before its last boundary."""
        if self._state != "end":
            raise BadRequest("the multipart body ends too early")


def _part(headers: bytes) -> Part:
    for line in headers.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() != "content-disposition":
            continue
        found = {key.lower(): _text(text) for key, text in _PARAMETER.findall(value)}
        if "name" in found and value.strip().lower().startswith("form-data"):
            filename = found.get("filename")
            if "filename*" in found:
                filename = unquote(found["filename*"].rpartition("'")[2])
            return Part(found["name"], filename)
    raise BadRequest("a part of the multipart body has no Content-Disposition with a name")


def _text(value: str) -> str:
    if value.startswith('"'):
        return re.sub(r"\\(.)", r"\1", value[1:-1])
    return value

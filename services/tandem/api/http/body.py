"""Reads a request's body within limits on size and time, and parses it.

A body may be compressed with gzip. Its size is then that of the decompressed bytes, and no more of
them than the largest body are ever made.

JSON is strict (RFC 8259): NaN, Infinity and invalid UTF-8 are refused. A byte order mark before the
JSON is skipped, which RFC 8259 allows. Half of a surrogate pair becomes U+FFFD.
"""

import asyncio
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.requests import Request

from tandem.api.ollama.errors import is_ollama
from tandem.common.config.router import RouterConfig
from tandem.common.surrogates import decode_json
from tandem.errors import BadRequest, BodyTooLarge, BodyTooLate, NotJson, UnknownCoding
from tandem.net.security.body_budget import Body

# If a body is too large, the server still reads it, up to this size, and discards it. If the server
# closed the connection while the client was still sending, the client would lose the response.
DISCARD_BYTES_MAX = 64 << 20
# Bodies of at most this size do not count in the body budget (the limit on the memory of all
# bodies). The limits on connections are enough for them, because a connection needs this much
# memory anyway.
_FREE_BYTES = 64 << 10
TOO_DEEP = "the body must be a JSON object with fewer levels: it is nested too deeply"
_GZIP = ("gzip", "x-gzip")  # x-gzip is the old name of gzip (RFC 9110, 8.4.1.3)
_GZIP_WINDOW_BITS = 31  # zlib: a gzip header, and the largest window
_MEMBERS_MAX = 64  # a gzip body may have several members, and each costs time
_PIECE_BYTES = 64 << 10  # a body is decompressed in pieces of at most this many bytes


async def read_json_object(request: Request, config: RouterConfig) -> dict[str, Any]:
    """Reads the body and parses it as a JSON object. Raises BadRequest, NotJson, and the errors of
    `read_body`."""
    _check_content_type(request)
    return parse_object(await read_body(request, config))


async def read_body(request: Request, config: RouterConfig) -> bytearray:
    """Reads the body as bytes, decompressed. Raises BodyTooLarge, BodyTooLate, BodiesFull,
    TooManyRequests, UnknownCoding for an unknown `Content-Encoding`, BadRequest for a damaged gzip
    body, and Starlette's ClientDisconnect."""
    gunzip = Gunzip() if _is_gzip(request) else None
    deadline = asyncio.timeout(config.body_deadline_s)

    def revoke() -> None:
        if not deadline.expired():
            deadline.reschedule(0)

    state = request.state
    with state.bodies.body(state.address, revoke, free_bytes=_FREE_BYTES) as account:
        try:
            async with deadline:
                return await _read_bounded(request, config.body_bytes_max, account, gunzip)
        except TimeoutError:
            account.check()
            late = f"the body did not arrive within {config.body_deadline_s:g} s"
            raise BodyTooLate(late) from None


def parse_object(body: bytes | bytearray) -> dict[str, Any]:
    """Parses a body. Raises BadRequest if the body is not a JSON object."""
    if not body:
        raise BadRequest("the body must be a JSON object; it is empty")
    try:
        # msgspec checks UTF-8 only in the strings that it decodes, so `decode` checks all bytes
        # first.
        value = decode_json(body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body must be UTF-8; byte {error.start} is not") from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body must be a JSON object: {error}") from None
    except RecursionError:
        raise BadRequest(TOO_DEEP) from None
    if not isinstance(value, dict):
        raise BadRequest(f"the body must be a JSON object, not {_json_type(value)}")
    return value


class Gunzip:
    """Decompresses a gzip body as it arrives."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(_GZIP_WINDOW_BITS)
        self._num_members = 0

    def push(self, data: bytes) -> Iterator[bytes]:
        """Yields the decompressed bytes in pieces. The caller stops when it has enough, so that a
        small body cannot fill the memory. Raises BadRequest if the data is not gzip."""
        is_full = False  # True: zlib may have more output of the data that it has read
        while data or is_full:
            if self._member.eof and not (data := data.lstrip(b"\0")):
                return  # some programs fill up the last block with zeros
            if self._member.eof or not self._num_members:
                self._num_members += 1
                self._member = zlib.decompressobj(_GZIP_WINDOW_BITS)
            if self._num_members > _MEMBERS_MAX:
                raise BadRequest(f"the gzip body has more than {_MEMBERS_MAX} members")
            try:
                piece = self._member.decompress(data, _PIECE_BYTES)
            except zlib.error as error:
                raise BadRequest(f"the body is not valid gzip: {error}") from None
            is_full = len(piece) == _PIECE_BYTES and not self._member.eof
            data = self._member.unused_data if self._member.eof else self._member.unconsumed_tail
            if piece:
                yield piece

    def check_end(self) -> None:
        """Raises BadRequest if the body ends in the middle of the compressed data."""
        if self._num_members and not self._member.eof:
            raise BadRequest("the body is not valid gzip: it ends too early")


def _check_content_type(request: Request) -> None:
    """Raises NotJson if the header `Content-Type` names another type than JSON.

    Ollama does not read this header, and the calls in its documentation have curl's default, which
    is the type of a form. So a call of Ollama's API may have any type, unless it comes from a web
    page: browsers send `Origin` then, and a foreign page must not call without a CORS preflight.
    """
    if is_ollama(request.scope) and "origin" not in request.headers:
        return
    sent = request.headers.get("content-type", "")
    media_type = sent.partition(";")[0].strip().lower()
    if media_type and media_type != "application/json" and not media_type.endswith("+json"):
        raise NotJson(f"send the header Content-Type: application/json, not {sent[:100]!r}")


def _is_gzip(request: Request) -> bool:
    """Returns whether the body is compressed. Raises UnknownCoding for another coding than gzip."""
    coding = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
    if coding not in ("", "identity", *_GZIP):
        raise UnknownCoding(
            f"the header Content-Encoding must be gzip or absent; {coding[:100]!r} is not supported"
        )
    return coding in _GZIP


async def _read_bounded(
    request: Request, bytes_max: int, account: Body, gunzip: Gunzip | None
) -> bytearray:
    body = bytearray()
    num_sent = num_bytes = 0
    is_too_large = False
    async for chunk in request.stream():
        num_sent += len(chunk)
        if num_sent > DISCARD_BYTES_MAX:
            break
        if is_too_large:
            continue  # the rest is read and discarded
        for piece in (chunk,) if gunzip is None else gunzip.push(chunk):
            num_bytes += len(piece)
            if is_too_large := max(num_sent, num_bytes) > bytes_max:
                body.clear()
                account.release()
                break
            account.take(len(piece))
            body += piece
    if is_too_large or num_sent > bytes_max:
        raise BodyTooLarge(f"the body must have at most {bytes_max} bytes")
    if gunzip is not None:
        gunzip.check_end()
    return body


def _json_type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")

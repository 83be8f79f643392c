"""Reads a request's body within limits on size and time, and parses it.

JSON is strict (RFC 8259): NaN, Infinity, invalid UTF-8 and lone surrogates are refused.
"""

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request

from tandem.common.config.router import RouterConfig
from tandem.errors import BadRequest, BodyTooLarge, BodyTooLate, NotJson
from tandem.net.security.body_budget import Body

# If a body is too large, the server still reads it, up to this size, and discards it. If the server
# closed the connection while the client was still sending, the client would lose the response.
DISCARD_BYTES_MAX = 64 << 20
# Bodies of at most this size do not count in the body budget (the limit on the memory of all
# bodies). The limits on connections are enough for them, because a connection needs this much
# memory anyway.
_FREE_BYTES = 64 << 10


async def read_json_object(request: Request, config: RouterConfig) -> dict[str, Any]:
    """Reads the body and parses it as a JSON object. Raises BadRequest, NotJson, and the errors of
    `read_body`."""
    _check_content_type(request)
    return parse_object(await read_body(request, config))


async def read_body(request: Request, config: RouterConfig) -> bytearray:
    """Reads the body as bytes. Raises BodyTooLarge, BodyTooLate, BodiesFull, TooManyRequests, and
    Starlette's ClientDisconnect."""
    deadline = asyncio.timeout(config.body_deadline_s)

    def revoke() -> None:
        if not deadline.expired():
            deadline.reschedule(0)

    state = request.state
    with state.bodies.body(state.address, revoke, free_bytes=_FREE_BYTES) as account:
        try:
            async with deadline:
                return await _read_bounded(request, config.body_bytes_max, account)
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
        value = msgspec.json.decode(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body must be UTF-8; byte {error.start} is not") from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body must be a JSON object: {error}") from None
    except RecursionError:
        raise BadRequest(
            "the body must be a JSON object with fewer levels: it is nested too deeply"
        ) from None
    if not isinstance(value, dict):
        raise BadRequest(f"the body must be a JSON object, not {_json_type(value)}")
    return value


def _check_content_type(request: Request) -> None:
    """Raises NotJson if the header `Content-Type` names another type than JSON, or if the header
    `Content-Encoding` is set."""
    sent = request.headers.get("content-type", "")
    media_type = sent.partition(";")[0].strip().lower()
    if media_type and media_type != "application/json" and not media_type.endswith("+json"):
        raise NotJson(f"send the header Content-Type: application/json, not {sent[:100]!r}")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise NotJson(f"send the body without Content-Encoding; {coding[:100]!r} is not supported")


async def _read_bounded(request: Request, bytes_max: int, account: Body) -> bytearray:
    body = bytearray()
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes <= bytes_max:
            account.take(len(chunk))
            body += chunk
        elif num_bytes > DISCARD_BYTES_MAX:
            break
        else:
            body.clear()
            account.release()
    if num_bytes > bytes_max:
        raise BodyTooLarge(f"the body must have at most {bytes_max} bytes")
    return body


def _json_type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")

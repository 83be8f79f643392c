"""A request's body: bounded while it arrives, then parsed to plain data.

Strict JSON (RFC 8259): NaN and Infinity, invalid UTF-8 and lone surrogates are refused.
"""

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request

from tandem.config.router import RouterConfig
from tandem.errors import BadRequest, BodyTooLarge, BodyTooLate, NotJson

# A too large body is read to its end and dropped, up to here: a client that still writes when the
# connection closes sees a reset connection, and not the answer.
DISCARD_BYTES_MAX = 64 << 20


async def read_json_object(request: Request, config: RouterConfig) -> dict[str, Any]:
    """Reads the body. Raises BadRequest, BodyTooLarge, BodyTooLate, NotJson; starlette
    ClientDisconnect."""
    _check_content_type(request)
    return parse_object(await read_body(request, config))


async def read_body(request: Request, config: RouterConfig) -> bytes:
    """Reads the body as bytes. Raises BodyTooLarge, BodyTooLate; starlette ClientDisconnect."""
    try:
        async with asyncio.timeout(config.body_deadline_s):
            return await _read_bounded(request, config.body_bytes_max)
    except TimeoutError:
        late = f"the body did not arrive within {config.body_deadline_s:g} s"
        raise BodyTooLate(late) from None


def parse_object(body: bytes) -> dict[str, Any]:
    """Raises BadRequest when it is not a JSON object."""
    if not body:
        raise BadRequest("the body must be a JSON object; it is empty")
    try:
        # msgspec reports bad UTF-8 only where it looks; this is one pass over the bytes.
        value = msgspec.json.decode(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body must be UTF-8; byte {error.start} is not") from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body must be a JSON object: {error}") from None
    except RecursionError:
        raise BadRequest("the body must be a JSON object that is not nested so deep") from None
    if not isinstance(value, dict):
        raise BadRequest(f"the body must be a JSON object, not {_json_type(value)}")
    return value


def _check_content_type(request: Request) -> None:
    """Raises NotJson for a body that says to be something else. One that says nothing is read."""
    sent = request.headers.get("content-type", "")
    media_type = sent.partition(";")[0].strip().lower()
    if media_type and media_type != "application/json" and not media_type.endswith("+json"):
        raise NotJson(f"send the header Content-Type: application/json, not {sent[:100]!r}")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise NotJson(f"send the body as it is, without Content-Encoding, not as {coding[:100]!r}")


async def _read_bounded(request: Request, bytes_max: int) -> bytes:
    chunks = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes <= bytes_max:
            chunks.append(chunk)
        elif num_bytes > DISCARD_BYTES_MAX:
            break
        else:
            chunks.clear()
    if num_bytes > bytes_max:
        raise BodyTooLarge(f"the body must have at most {bytes_max} bytes")
    return b"".join(chunks)


def _json_type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")

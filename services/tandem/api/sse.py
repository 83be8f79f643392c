"""Encodes server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"  # the last event of OpenAI's streams, which is not JSON
# A comment, which parsers of events ignore. It shows proxies that the stream is alive.
KEEP_ALIVE = b": keep-alive\n\n"
_encode = msgspec.json.Encoder().encode
# UTF-8 of U+2028, U+2029 and U+0085 -> their escapes in JSON. Some clients split a stream at every
# character that Unicode calls a line break, and would cut an event there.
_SEPARATORS = (
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
    (b"\xc2\x85", b"\\u0085"),
)


def event(data: Any, name: str = "") -> bytes:
    """Encodes one event. `data` is encoded as JSON. `name` is the event's name; "": the event has
    none."""
    head = f"event: {name}\n".encode() if name else b""
    encoded = _encode(data)
    for character, escape in _SEPARATORS:
        encoded = encoded.replace(character, escape)
    return head + b"data: " + encoded + b"\n\n"

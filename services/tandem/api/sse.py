"""Encodes server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from typing import Any

import msgspec

from tandem.common.line_breaks import without_breaks

DONE = b"data: [DONE]\n\n"  # the last event of OpenAI's streams, which is not JSON
# A comment, which parsers of events ignore. It shows proxies that the stream is alive.
KEEP_ALIVE = b": keep-alive\n\n"
_encode = msgspec.json.Encoder().encode


def event(data: Any, name: str = "") -> bytes:
    """Encodes one event. `data` is encoded as JSON. `name` is the event's name; "": the event has
    none."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + without_breaks(_encode(data)) + b"\n\n"

"""Server-sent events, as bytes (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"  # OpenAI's last event, which is no JSON
_encode = msgspec.json.Encoder().encode


def event(data: Any, name: str = "") -> bytes:
    """Returns an event with this data as JSON."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + _encode(data) + b"\n\n"

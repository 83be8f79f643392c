"""Replies in the format of Anthropic's messages API: a stream of events, or a complete message.

A stream has these events, in this order:

  message_start, ping
  for each content block: content_block_start, one or more content_block_delta, content_block_stop
  message_delta, message_stop

A content block is text, thinking or one tool call, and ends where another kind of content begins.
A complete message is built from the same events, as a client of the stream would build it.
https://platform.claude.com/docs/en/build-with-claude/streaming
"""

import base64
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import asdict

from tandem.api.anthropic.errors import error_body
from tandem.api.openai.parsed import ParsedRequest
from tandem.api.openai.tools import arguments_of
from tandem.api.sse import event
from tandem.errors import TandemError
from tandem.models.tokenizer.tokenizer import Tokenizer
from tandem.router.parsers.machine import CallDelta
from tandem.router.request.delta import Delta, Usage
from tandem.router.request.retention import TTLS_S

# content block type -> (field of a delta with the new text, type of the delta)
_TEXT = {
    "text": ("text", "text_delta"),
    "thinking": ("thinking", "thinking_delta"),
    "tool_use": ("partial_json", "input_json_delta"),
}


_PING = {"type": "ping"}


def usage_body(usage: Usage, pin_s: float = 0.0) -> dict[str, Any]:
    """Builds the `usage` object. `input_tokens` counts neither the prompt tokens read from the KV
    cache nor those that `cache_control` pinned in the KV cache. `pin_s` is the duration of the pins
    in seconds; 0: nothing was pinned."""
    created = max(0, usage.storable_tokens - usage.cached_tokens) if pin_s else 0
    body: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - created,
        "cache_creation_input_tokens": created,
        "cache_creation": {
            f"ephemeral_{ttl}_input_tokens": created if seconds == pin_s else 0
            for ttl, seconds in TTLS_S.items()
        },
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }
    if usage.cached_by_tier is not None:
        body["cache_read_input_tokens_by_tier"] = asdict(usage.cached_by_tier)
    return body


class MessageReplies:
    """The reply to one request, as a stream or as a complete message."""

    num_choices = 1

    def __init__(
        self, parsed: ParsedRequest, model: str, tokenizer: Tokenizer | None = None
    ) -> None:
        """Takes the same arguments as the reply classes of the other APIs. Anthropic's messages
        have no log probabilities, so `tokenizer` is unused."""
        self.reply_id = f"msg_{parsed.request_id}"
        self._model = model
        self._pin_s = parsed.requests[0].retention.pin_s
        self._max_tokens = parsed.requests[0].sampling.max_tokens or 0
        self._blocks = _Blocks()
        self._has_begun = False

    def whole(self, choices: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        """Builds the complete message from all deltas. `choices` has one element, because a message
        has no alternative answers."""
        (deltas,) = choices
        message: dict[str, Any] = {}
        partial = ""  # text of the current content block so far
        for one in (e for delta in deltas for e in self._events(delta)):
            if one["type"] == "message_start":
                message = one["message"]
            elif one["type"] == "content_block_start":
                message["content"].append(one["content_block"])
                partial = ""
            elif one["type"] == "content_block_delta" and "signature" in one["delta"]:
                message["content"][-1]["signature"] = one["delta"]["signature"]
            elif one["type"] == "content_block_delta":
                name, _ = _TEXT[message["content"][-1]["type"]]
                partial += one["delta"][name]
            elif one["type"] == "content_block_stop":
                _fill(message["content"][-1], partial)
            elif one["type"] == "message_delta":
                message |= {**one["delta"], "usage": one["usage"]}
        return message

    def events(self, choice: int, delta: Delta) -> bytes:
        """Encodes the events of one delta."""
        return b"".join(event(one, one["type"]) for one in self._events(delta))

    def keep_alive(self) -> bytes:
        """Encodes a ping, which may also come before `message_start`."""
        return event(_PING, _PING["type"])

    def ending(self) -> bytes:
        """Returns b"", because `events` has sent `message_stop` together with the last delta."""
        return b""

    def failure(self, error: TandemError) -> bytes:
        """Encodes the error event that ends a stream early."""
        return event(error_body(error), "error")

    def _events(self, delta: Delta) -> Iterator[dict[str, Any]]:
        if not self._has_begun:
            self._has_begun = True
            yield {"type": "message_start", "message": self._empty_message(delta)}
            yield _PING
        yield from self._blocks.push(delta)
        if delta.finish_reason:
            stop_reason, stop_sequence = _stopped(
                delta, self._max_tokens, has_calls=self._blocks.num_calls > 0
            )
            stopped = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
            usage = usage_body(delta.usage, self._pin_s)
            yield {"type": "message_delta", "delta": stopped, "usage": usage}
            yield {"type": "message_stop"}

    def _empty_message(self, delta: Delta) -> dict[str, Any]:
        return {
            "id": self.reply_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_body(delta.usage, self._pin_s),
        }


class _Blocks:
    """Converts the model's output deltas to Anthropic's events of content blocks."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._index = -1
        # type of the content block that has begun and not ended; empty if there is none
        self._open = ""
        self._thought = hashlib.sha256()

    def push(self, delta: Delta) -> Iterator[dict[str, Any]]:
        if delta.reasoning:
            yield from self._add("thinking", delta.reasoning)
        if delta.text:
            yield from self._add("text", delta.text)
        for call in delta.tool_calls:
            yield from self._add_call(call)
        if delta.finish_reason:
            yield from self._close()

    def _add(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if self._open != kind:
            yield from self._close()
            more = {"signature": ""} if kind == "thinking" else {}
            yield self._begin({"type": kind, kind: "", **more})
        if kind == "thinking":
            self._thought.update(text.encode())
        yield self._delta(text)

    def _add_call(self, call: CallDelta) -> Iterator[dict[str, Any]]:
        if call.name:
            yield from self._close()
            self.num_calls += 1
            yield self._begin({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        if call.arguments:
            yield self._delta(call.arguments)

    def _begin(self, block: dict[str, Any]) -> dict[str, Any]:
        self._index += 1
        self._open = block["type"]
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, text: str) -> dict[str, Any]:
        name, kind = _TEXT[self._open]
        delta = {"type": kind, name: text}
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> Iterator[dict[str, Any]]:
        if not self._open:
            return
        if self._open == "thinking":
            # Clients drop or refuse a thinking block without a signature. Tandem's signature is a
            # hash of the block's text.
            signature = base64.b64encode(self._thought.digest()).decode()
            delta = {"type": "signature_delta", "signature": signature}
            yield {"type": "content_block_delta", "index": self._index, "delta": delta}
            self._thought = hashlib.sha256()
        yield {"type": "content_block_stop", "index": self._index}
        self._open = ""


def _fill(block: dict[str, Any], text: str) -> None:
    """Stores the collected text of a content block, for example in the field `text` of a block of
    the type `text`. The text of a tool call is parsed as JSON."""
    if block["type"] == "tool_use":
        block["input"] = arguments_of(text)
    else:
        block[block["type"]] = text


def _stopped(delta: Delta, max_tokens: int, *, has_calls: bool) -> tuple[str, str | None]:
    """Returns Anthropic's `stop_reason` and `stop_sequence` for a delta with a finish reason.
    `max_tokens` is the number that the client sent; the context may have had room for fewer.
    `has_calls` is True if the message contains a tool call."""
    if delta.finish_reason == "length":
        is_full = delta.usage.completion_tokens < max_tokens
        return "model_context_window_exceeded" if is_full else "max_tokens", None
    if has_calls:
        return "tool_use", None
    if isinstance(delta.stop_reason, str):
        return "stop_sequence", delta.stop_reason
    return "end_turn", None

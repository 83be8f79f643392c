"""Replies in the format of Ollama's API: a stream of JSON objects, one on each line, or one object.

The last line of a stream has the counts and durations, in nanoseconds:

    total_duration         from the request to the last token
    load_duration          always 0: the model is loaded
    prompt_eval_duration   from the request to the first token
    eval_duration          from the first token to the last
"""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from tandem.api.ollama.errors import error_body
from tandem.api.openai.logprobs import ChoiceLogprobs
from tandem.api.openai.parsed import ParsedRequest
from tandem.api.openai.tools import arguments_of, joined
from tandem.common.line_breaks import without_breaks
from tandem.errors import TandemError
from tandem.models.tokenizer.tokenizer import Tokenizer
from tandem.router.parsers.machine import CallDelta
from tandem.router.request.delta import Delta

NDJSON = "application/x-ndjson"
_encode = msgspec.json.Encoder().encode


def now() -> str:
    return time_text(time.time())


def time_text(seconds: float) -> str:
    """Formats a time in seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def loaded(model: str, reason: str, *, is_chat: bool) -> dict[str, Any]:
    """Builds the reply to a request without a prompt, which asks to load or unload a model."""
    empty = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    end = {"done": True, "done_reason": reason}
    return {"model": model, "created_at": now(), **empty, **end}


class OllamaReplies:
    """The reply to one request of /api/chat or /api/generate."""

    num_choices = 1

    def __init__(
        self, parsed: ParsedRequest, model: str, tokenizer: Tokenizer | None, *, is_chat: bool
    ) -> None:
        self.reply_id = parsed.request_id
        self._model = model
        self._is_chat = is_chat
        self._calls: list[CallDelta] = []
        request = parsed.requests[0]
        self._logprobs = (
            ChoiceLogprobs(tokenizer, parsed, request)
            if tokenizer is not None and request.sampling.logprobs is not None
            else None
        )

    def whole(self, choices: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        """Builds the reply that is not streamed."""
        (deltas,) = choices
        self._calls = [call for delta in deltas for call in delta.tool_calls]
        content = "".join(delta.text for delta in deltas)
        reasoning = "".join(delta.reasoning for delta in deltas)
        body = self._part(content, reasoning, self._finished_calls())
        if self._logprobs is not None:
            body["logprobs"] = [one for delta in deltas for one in self._measured(delta)]
        return body | _ended(deltas[-1])

    def events(self, choice: int, delta: Delta) -> bytes:
        """Encodes the lines for one delta. A tool call is sent when its arguments are complete."""
        self._calls += delta.tool_calls
        lines = b""
        calls = self._finished_calls() if delta.finish_reason else []
        measured = self._measured(delta)
        if delta.text or delta.reasoning or calls or measured:
            part = self._part(delta.text, delta.reasoning, calls)
            if measured:
                part["logprobs"] = measured
            lines += self._line({**part, "done": False})
        if delta.finish_reason:
            lines += self._line(self._part("", "", []) | _ended(delta))
        return lines

    def keep_alive(self) -> bytes:
        """Encodes a line without text."""
        return self._line({**self._part("", "", []), "done": False})

    def ending(self) -> bytes:
        """Returns b"", because `events` has sent the last line together with the last delta."""
        return b""

    def failure(self, error: TandemError) -> bytes:
        """Encodes the line that ends a stream early."""
        return self._line(error_body(error))

    def _part(self, text: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        head: dict[str, Any] = {"model": self._model, "created_at": now()}
        thought = {"thinking": reasoning} if reasoning else {}
        if not self._is_chat:
            return {**head, "response": text, **thought}
        message: dict[str, Any] = {"role": "assistant", "content": text, **thought}
        if calls:
            message["tool_calls"] = calls
        return {**head, "message": message}

    def _finished_calls(self) -> list[dict[str, Any]]:
        return [
            {
                "id": call.id,
                "function": {
                    "index": call.index,
                    "name": call.name,
                    "arguments": arguments_of(call.arguments),
                },
            }
            for call in joined(self._calls)
        ]

    def _measured(self, delta: Delta) -> list[dict[str, Any]]:
        return [] if self._logprobs is None else self._logprobs.chat(delta)["content"]

    @staticmethod
    def _line(body: dict[str, Any]) -> bytes:
        return without_breaks(_encode(body)) + b"\n"


def _ended(last: Delta) -> dict[str, Any]:
    """Builds the fields of the end of an answer."""
    body: dict[str, Any] = {
        "done": True,
        "done_reason": "length" if last.finish_reason == "length" else "stop",
        "load_duration": 0,
        "prompt_eval_count": last.usage.prompt_tokens,
        "eval_count": last.usage.completion_tokens,
    }
    if (timeline := last.timeline) is not None:
        total_s = timeline.last_token_s - timeline.began_s
        prompt_s = timeline.ttft_s or 0.0
        body |= {
            "total_duration": _nanoseconds(total_s),
            "prompt_eval_duration": _nanoseconds(prompt_s),
            "eval_duration": _nanoseconds(total_s - prompt_s),
        }
    return body


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))

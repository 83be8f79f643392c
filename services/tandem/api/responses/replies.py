"""Replies in the format of OpenAI's responses API: stream events, and the complete response.

A stream has these events, in this order:

  1. response.created, response.in_progress
  2. for each output item (reasoning, a message or a function call):
       output_item.added
       content_part.added (not for a function call)
       several events with a piece of the text or of the arguments, ending in `.delta`
       one event with the complete text or the complete arguments, ending in `.done`
       content_part.done (not for a function call)
       output_item.done
  3. response.completed; if the length limit was reached, response.incomplete

Each event has a `sequence_number`, counted from 0.
https://www.openresponses.org/specification
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tandem.api.openai.logprobs import ChoiceLogprobs
from tandem.api.responses.output import OutputItems
from tandem.api.responses.requests import ParsedResponse
from tandem.api.sse import DONE, KEEP_ALIVE, event
from tandem.errors import TandemError
from tandem.models.tokenizer.tokenizer import Tokenizer
from tandem.router.request.delta import Delta, Usage


def usage_body(usage: Usage) -> dict[str, Any]:
    """Builds the `usage` object of a response."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {**usage.cached_details, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class ResponseReplies:
    """The reply to one request. `response` is the response object with the output generated so
    far."""

    num_choices = 1

    def __init__(
        self,
        parsed: ParsedResponse,
        model: str,
        tokenizer: Tokenizer | None,
        *,
        keep: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        """`keep` is called with the complete response. None: the response is not kept."""
        request_id = parsed.chat.request_id
        self.reply_id = f"resp_{request_id}"
        self._keep = keep
        self._sequence_number = 0
        (request,) = parsed.chat.requests
        logprobs = None
        if request.sampling.logprobs is not None:
            assert tokenizer is not None
            logprobs = ChoiceLogprobs(tokenizer, parsed.chat, request)
        self._items = OutputItems(request_id, parsed.tools, logprobs)
        self.response: dict[str, Any] = {
            "id": self.reply_id,
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "model": model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "store": keep is not None,
            **parsed.body.told(),
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
        }

    def whole(self, choices: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        """Builds the complete response from all deltas of the single choice."""
        (deltas,) = choices
        for delta in deltas:
            for _ in self._events(delta):
                pass
        return self.response

    def events(self, choice: int, delta: Delta) -> bytes:
        """Encodes the events of a delta."""
        return b"".join(self._numbered(one) for one in self._events(delta))

    def keep_alive(self) -> bytes:
        """Encodes a comment, which clients ignore."""
        return KEEP_ALIVE

    def ending(self) -> bytes:
        """Encodes the event that ends a stream without an error."""
        return DONE

    def failure(self, error: TandemError) -> bytes:
        """Encodes the two events that end a stream after an error: `error` and
        `response.failed`."""
        about = {"code": error.code, "message": error.message}
        ending = self._numbered({"type": "error", **about, "param": error.param})
        code = "rate_limit_exceeded" if error.http_status == 429 else "server_error"
        self.response |= {"status": "failed", "error": {**about, "code": code}}
        return ending + self._numbered({"type": "response.failed", "response": self.response})

    def _numbered(self, data: dict[str, Any]) -> bytes:
        numbered = {**data, "sequence_number": self._sequence_number}
        self._sequence_number += 1
        return event(numbered, data["type"])

    def _events(self, delta: Delta) -> Iterator[dict[str, Any]]:
        if not self._items.has_begun:
            for kind in ("created", "in_progress"):
                yield {"type": f"response.{kind}", "response": self.response}
        yield from self._items.push(delta)
        if delta.finish_reason:
            self._end(delta)
            yield {"type": f"response.{self.response['status']}", "response": self.response}

    def _end(self, delta: Delta) -> None:
        is_cut = delta.finish_reason == "length"
        self.response |= {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "completed_at": None if is_cut else int(time.time()),
            "output": self._items.items,
            "usage": usage_body(delta.usage),
        }
        if self._keep is not None:
            self._keep(self.response)

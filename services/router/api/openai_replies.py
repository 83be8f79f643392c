"""What OpenAI's clients get back: whole answers and the chunks of a stream, as plain data."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

from services.router.api.openai_requests import ParsedRequest
from services.router.generate import Delta, Usage


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


@dataclass(slots=True)
class Replies:
    """The replies to one request. Token ids are told where vLLM tells them."""

    parsed: ParsedRequest
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    _is_first: bool = True

    @property
    def is_chat(self) -> bool:
        return self.parsed.request.kind == "chat"

    @property
    def reply_id(self) -> str:
        prefix = "chatcmpl-" if self.is_chat else "cmpl-"
        return prefix + self.parsed.request.request_id

    def whole(
        self, text: str, token_ids: list[int], prompt_token_ids: list[int], last: Delta
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "logprobs": None,
            "finish_reason": last.finish_reason,
        }
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        body = self._head("chat.completion" if self.is_chat else "text_completion")
        if self.parsed.return_token_ids:
            choice["token_ids"] = token_ids
            (body if self.is_chat else choice)["prompt_token_ids"] = prompt_token_ids
        return {**body, "choices": [choice], "usage": usage_body(last.usage)}

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """What a delta becomes: one chunk, before it a chat's first, after the last the usage."""
        chunks = []
        if self._is_first and self.is_chat:
            chunks.append(self._chunk({"role": "assistant", "content": ""}, delta, is_head=True))
        chunks.append(self._chunk({"content": delta.text}, delta))
        self._is_first = False
        if delta.finish_reason and self.parsed.include_usage:
            chunks.append({**self._chunk_head(), "choices": [], "usage": usage_body(delta.usage)})
        return chunks

    def _chunk(
        self, message: dict[str, Any], delta: Delta, *, is_head: bool = False
    ) -> dict[str, Any]:
        finish_reason = None if is_head else delta.finish_reason or None
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        body = self._chunk_head()
        if self.is_chat:
            choice["delta"] = message
        else:
            choice["text"] = delta.text
        if self.parsed.return_token_ids:
            if not is_head:
                choice["token_ids"] = delta.token_ids
            if self._is_first and is_head == self.is_chat:
                target = body if self.is_chat else choice
                target["prompt_token_ids"] = delta.prompt_token_ids
        body["choices"] = [choice]
        if self.parsed.include_usage:
            body["usage"] = None
        if self.parsed.continuous_usage:
            # As at vLLM: a chat's first chunk comes before any token.
            usage = replace(delta.usage, completion_tokens=0) if is_head else delta.usage
            body["usage"] = usage_body(usage)
        return body

    def _chunk_head(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self.is_chat else "text_completion")

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.reply_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
        }

"""Replies in OpenAI's format: complete bodies and stream chunks."""

import time
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.api.openai.errors import error_body
from tandem.api.openai.logprobs import ChoiceLogprobs
from tandem.api.openai.parsed import ParsedRequest
from tandem.api.openai.tools import CallChunks, call_body, joined
from tandem.api.sse import DONE, KEEP_ALIVE, event
from tandem.errors import TandemError
from tandem.models.tokenizer.tokenizer import Tokenizer
from tandem.router.request.delta import Delta, Usage


def usage_body(usage: Usage) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": usage.cached_details,
        **usage.marks,
    }
    if usage.reasoning_tokens:
        body["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return body


def summed(usages: Iterable[Usage]) -> Usage:
    return sum(usages, Usage(0, 0, 0))


@dataclass(slots=True)
class Replies:
    """The reply to one request: builds the chunks of a stream, or the complete body. Token ids, if
    the client asks for them, are in the same fields as in vLLM's replies."""

    parsed: ParsedRequest
    model: str
    tokenizer: Tokenizer | None = None  # needed only if the client asks for log probabilities
    created: int = field(default_factory=lambda: int(time.time()))
    # indices of the choices whose first chunk was built
    _begun: set[int] = field(default_factory=set)
    # one usage for each prompt that is complete, that is, all choices of the prompt have ended
    _ended: list[Usage] = field(default_factory=list)
    # choice index -> formatter of the choice's log probabilities
    _logprobs: dict[int, ChoiceLogprobs] = field(default_factory=dict)
    _calls: dict[int, CallChunks] = field(default_factory=dict)  # by choice index

    @property
    def is_chat(self) -> bool:
        return self.parsed.requests[0].kind == "chat"

    @property
    def reply_id(self) -> str:
        prefix = "chatcmpl-" if self.is_chat else "cmpl-"
        return prefix + self.parsed.request_id

    @property
    def num_choices(self) -> int:
        return self.parsed.num_choices

    def events(self, choice: int, delta: Delta) -> bytes:
        """Encodes the chunks for one delta as server-sent events."""
        return b"".join(map(event, self.chunks(choice, delta)))

    def keep_alive(self) -> bytes:
        """Encodes a comment, which clients ignore."""
        return KEEP_ALIVE

    def ending(self) -> bytes:
        """Encodes the event that ends a stream without an error."""
        return DONE

    def failure(self, error: TandemError) -> bytes:
        """Encodes the error event that ends a stream early."""
        return event(error_body(error))

    def whole(self, choices: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        """Builds the complete reply from all deltas of each choice."""
        body = self._head("chat.completion" if self.is_chat else "text_completion")
        body["choices"] = [self._whole_choice(i, deltas) for i, deltas in enumerate(choices)]
        if self.parsed.return_token_ids and self.is_chat:
            body["prompt_token_ids"] = choices[0][0].prompt_token_ids
        if self.is_chat:
            is_wanted = self.parsed.prompt_logprobs is not None
            body["prompt_logprobs"] = (
                self._logprobs_of(0).prompt(choices[0][0]) if is_wanted else None
            )
        totals = (delta.total for deltas in choices for delta in deltas)
        body["usage"] = usage_body(summed(total for total in totals if total is not None))
        return body

    def _whole_choice(self, index: int, deltas: Sequence[Delta]) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": self._logprobs_body(index, *deltas),
            "finish_reason": deltas[-1].finish_reason,
            "stop_reason": deltas[-1].stop_reason,
        }
        if self.is_chat:
            choice["message"] = _message(text, deltas, self.parsed.custom_tools)
        else:
            is_wanted = self.parsed.prompt_logprobs is not None
            choice["prompt_logprobs"] = (
                self._logprobs_of(index).prompt(deltas[0]) if is_wanted else None
            )
            choice["text"] = text
        if self.parsed.return_token_ids:
            choice["token_ids"] = [t for delta in deltas for t in delta.token_ids]
            if not self.is_chat:
                choice["prompt_token_ids"] = deltas[0].prompt_token_ids
        return choice

    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Builds the chunks for one delta of a choice: usually one chunk.

        In a chat, the first chunk of each choice has only the role. If the client asks for the
        usage, the last chunk of the stream has the usage.
        """
        chunks = []
        if self.is_chat and index not in self._begun:
            head = {"role": "assistant", "content": ""}
            chunks.append(self._chunk(index, head, delta, is_head=True))
        message = self._delta_message(index, delta) if self.is_chat else {}
        if message or delta.finish_reason or self._sends_each_token:
            chunks.append(self._chunk(index, message, delta))
        self._begun.add(index)
        if delta.total is not None:
            self._ended.append(delta.total)
            if self.parsed.include_usage and len(self._ended) == len(self.parsed.requests):
                usage = usage_body(summed(self._ended))
                chunks.append({**self._chunk_head(), "choices": [], "usage": usage})
        return chunks

    def _delta_message(self, index: int, delta: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {}
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        if delta.text:
            message["content"] = delta.text
        chunks = self._calls.setdefault(index, CallChunks(self.parsed.custom_tools))
        if calls := chunks.push(delta.tool_calls, is_last=bool(delta.finish_reason)):
            message["tool_calls"] = calls
        return message

    @property
    def _sends_each_token(self) -> bool:
        """True if every delta gets a chunk, also a delta without text."""
        parsed = self.parsed
        wants_logprobs = parsed.requests[0].sampling.logprobs is not None
        shows_tokens = parsed.return_token_ids or wants_logprobs
        return not self.is_chat or shows_tokens or parsed.continuous_usage

    def _chunk(
        self, index: int, message: dict[str, Any], delta: Delta, *, is_head: bool = False
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": None if is_head else self._logprobs_body(index, delta),
            "finish_reason": None if is_head else delta.finish_reason or None,
            "stop_reason": None if is_head else delta.stop_reason,
        }
        body = self._chunk_head()
        if self.is_chat:
            # SGLang's clients read `reasoning_content` of every chunk, so every chunk has this
            # field.
            choice["delta"] = {"reasoning_content": None, **message}
        else:
            choice["text"] = delta.text
        if self.parsed.return_token_ids:
            if not is_head:
                choice["token_ids"] = delta.token_ids
            if index not in self._begun and is_head == self.is_chat:
                target = body if self.is_chat else choice
                target["prompt_token_ids"] = delta.prompt_token_ids
        body["choices"] = [choice]
        if self.parsed.include_usage:
            body["usage"] = None
        if self.parsed.continuous_usage:
            # As in vLLM, the usage in the first chunk of a chat counts no completion tokens.
            usage = replace(delta.usage, completion_tokens=0) if is_head else delta.usage
            body["usage"] = usage_body(usage)
        return body

    def _logprobs_body(self, index: int, *deltas: Delta) -> dict[str, Any] | None:
        if self.parsed.requests[0].sampling.logprobs is None:
            return None
        of_choice = self._logprobs_of(index)
        parts = map(of_choice.chat if self.is_chat else of_choice.completion, deltas)
        body: dict[str, list[Any]] = {}
        for part in parts:
            for name, entries in part.items():
                body.setdefault(name, []).extend(entries)
        return body

    def _logprobs_of(self, index: int) -> ChoiceLogprobs:
        if index not in self._logprobs:
            assert self.tokenizer is not None
            request = self.parsed.request_of(index)
            self._logprobs[index] = ChoiceLogprobs(self.tokenizer, self.parsed, request)
        return self._logprobs[index]

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


def _message(text: str, deltas: Sequence[Delta], custom: Container[str]) -> dict[str, Any]:
    """Builds the message of a complete chat reply. The message has the field `tool_calls` only if
    the model called tools. `custom` has the names of the tools of the type `custom`."""
    calls = joined([call for delta in deltas for call in delta.tool_calls])
    content = text or (None if calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    message["reasoning_content"] = "".join(delta.reasoning for delta in deltas) or None
    if calls:
        message["tool_calls"] = [call_body(call, custom) for call in calls]
    return message

"""Builds the output items of a response, and the stream events for these items."""

from collections.abc import Iterator
from typing import Any

from tandem.api.openai.logprobs import ChoiceLogprobs
from tandem.api.openai.tools import input_of
from tandem.api.responses.tools import ChatTools, ToolName
from tandem.router.parsers.machine import CallDelta
from tandem.router.request.delta import Delta

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
}
# item type -> name of the events with the item's text
_TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}


class OutputItems:
    """Converts deltas to output items and stream events. `items` has the completed items. The item
    that is still growing is called the open item, and there is at most one."""

    def __init__(self, request_id: str, tools: ChatTools, logprobs: ChoiceLogprobs | None) -> None:
        self.items: list[dict[str, Any]] = []
        self.has_begun = False
        self._request_id = request_id
        self._tools = tools
        self._logprobs = logprobs
        # log probabilities of tokens whose text is still held back, such as half of a character
        self._measured: list[dict[str, Any]] = []
        self._item: dict[str, Any] | None = None  # the open item, if there is one
        self._text = ""  # text of the open item; for a function call, the arguments
        self._text_logprobs: list[dict[str, Any]] = []  # log probabilities of the open item's text

    def push(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Adds a delta to the output items. Yields the stream events for the delta."""
        self.has_begun = True
        if self._logprobs is not None:
            measured = self._logprobs.chat(delta)["content"]
            # If the generation did not end at the length limit, its last token is a stop token.
            # This token has no text, so its log probability is left out.
            ends = delta.finish_reason not in ("", "length")
            self._measured += measured[:-1] if ends else measured
        if delta.reasoning:
            yield from self._add("reasoning", delta.reasoning)
        if delta.text:
            yield from self._add("message", delta.text)
        for call in delta.tool_calls:
            yield from self._add_call(call)
        if delta.text or delta.reasoning or delta.tool_calls:
            self._measured = []
        if delta.finish_reason:
            if self._item is None and not self.items:
                yield from self._open("message")  # A response must have at least one item.
            yield from self._close("incomplete" if delta.finish_reason == "length" else "completed")

    def _add(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if self._item is None or self._item["type"] != kind:
            yield from self._close()
            yield from self._open(kind)
        self._text += text
        more = {}
        if kind == "message":
            self._text_logprobs += self._measured
            more["logprobs"] = self._measured
        yield self._about(f"{_TEXTS[kind]}.delta", content_index=0, delta=text, **more)

    def _add_call(self, call: CallDelta) -> Iterator[dict[str, Any]]:
        if call.name:
            yield from self._close()
            name, namespace = self._tools.sent.get(call.name, ToolName(call.name))
            more = {} if namespace is None else {"namespace": namespace}
            is_custom = call.name in self._tools.custom
            more["input" if is_custom else "arguments"] = ""
            kind = "custom_tool_call" if is_custom else "function_call"
            yield from self._open(kind, call_id=call.id, name=name, **more)
        if call.arguments:
            self._text += call.arguments
            # The input of a custom tool is a string in the arguments, so it comes as one piece.
            if self._item is not None and self._item["type"] == "function_call":
                yield self._about("function_call_arguments.delta", delta=call.arguments)

    def _open(self, kind: str, **more: Any) -> Iterator[dict[str, Any]]:
        item = {
            "id": f"{_PREFIXES[kind]}_{self._request_id}_{len(self.items)}",
            "type": kind,
            "status": "in_progress",
            **more,
        }
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        self._item = item
        self._text = ""
        self._text_logprobs = []
        yield self._placed("output_item.added", item=dict(item))
        if kind in _TEXTS:
            yield self._about("content_part.added", content_index=0, part=self._part())

    def _close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        item = self._item
        if item is None:
            return
        kind = item["type"]
        if kind in _TEXTS:
            more = {"logprobs": self._text_logprobs} if kind == "message" else {}
            yield self._about(f"{_TEXTS[kind]}.done", content_index=0, text=self._text, **more)
            yield self._about("content_part.done", content_index=0, part=self._part())
            item["content"] = [self._part()]
        elif kind == "custom_tool_call":
            item["input"] = input_of(self._text)
            if item["input"]:
                yield self._about("custom_tool_call_input.delta", delta=item["input"])
            yield self._about("custom_tool_call_input.done", input=item["input"])
        else:
            item["arguments"] = self._text
            named = {"name": item["name"], "arguments": self._text}
            yield self._about("function_call_arguments.done", **named)
        item["status"] = status
        yield self._placed("output_item.done", item=item)
        self.items.append(item)
        self._item = None

    def _part(self) -> dict[str, Any]:
        """Builds the content part with the text of the open item."""
        assert self._item is not None
        kind = _TEXTS[self._item["type"]]
        if kind == "reasoning_text":
            return {"type": kind, "text": self._text}
        return {
            "type": kind,
            "text": self._text,
            "annotations": [],
            "logprobs": self._text_logprobs,
        }

    def _about(self, kind: str, **more: Any) -> dict[str, Any]:
        assert self._item is not None
        return self._placed(kind, item_id=self._item["id"], **more)

    def _placed(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}", "output_index": len(self.items), **more}

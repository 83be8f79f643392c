"""Converts a gRPC chat to a Conversation: messages, tools and template options."""

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ValidationError

from tandem.api.openai.tools import TOOLS, arguments_of
from tandem.errors import BadRequest
from tandem.net.rpc.tandem.v1 import inference_pb2 as pb
from tandem.router.request.allowed import refusal
from tandem.router.request.conversation import Conversation, Message, ToolCall

_CHOICES: Mapping[str, Literal["auto", "none", "required"]] = {
    "": "auto",
    "auto": "auto",
    "none": "none",
    "required": "required",
}


def parse_chat(chat: pb.Chat) -> Conversation:
    """Converts the protobuf message Chat. Raises BadRequest, which names the invalid field and the
    allowed values."""
    choice = _CHOICES.get(chat.tool_choice)
    if choice is None:
        raise refusal("tool_choice", chat.tool_choice)
    if chat.function and choice != "required":
        raise refusal("function", chat.function)
    try:
        tools = TOOLS.validate_python([_json_object("tools", text) for text in chat.tools])
    except ValidationError as error:
        raise BadRequest(
            f"{refusal('tools').message} ({error.errors()[0]['msg']})", param="tools"
        ) from None
    options = chat.chat_template_kwargs
    ends_with_head = not chat.continue_final_message
    if chat.HasField("add_generation_prompt"):
        ends_with_head = chat.add_generation_prompt
    return Conversation(
        tuple(map(_message, chat.messages)),
        tools=tuple(tools),
        tool_choice=choice,
        only_tool=chat.function,
        parallel_tool_calls=chat.parallel_tool_calls or not chat.HasField("parallel_tool_calls"),
        reasoning_effort=chat.reasoning_effort if chat.HasField("reasoning_effort") else None,
        template_options=_json_object("chat_template_kwargs", options) if options else {},
        add_generation_prompt=ends_with_head,
        continue_final_message=chat.continue_final_message,
        add_special_tokens=chat.add_special_tokens,
    )


def _message(message: pb.ChatMessage) -> Message:
    calls = tuple(ToolCall(c.id, c.name, arguments_of(c.arguments)) for c in message.tool_calls)
    return Message(
        role=message.role,
        content=message.content or (None if calls else ""),
        tool_calls=calls,
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning=message.reasoning,
    )


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise refusal(name, text)
    return value

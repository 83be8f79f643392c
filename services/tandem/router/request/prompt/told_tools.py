"""Tells a model of tools in words, where its chat template does not.

The tools stand in the system message, and earlier calls and their results are messages of their
own. The model is asked for the format that the parser `json` reads.
"""

import json
from dataclasses import replace
from typing import Any

from tandem.router.request.conversation import Conversation, Message, ToolCall

_ASKS = (
    "You may call functions. To call some, answer with nothing but a JSON list of objects "
    'such as {"name": "FUNCTION", "arguments": {...}}. These are the functions:'
)


def with_told_tools(chat: Conversation) -> Conversation:
    """Returns the chat as a template without tools can render it; the tools are still its own.

    One without tools and calls is as it was: the template knows it.
    """
    if not (chat.tools or any(message.tool_calls for message in chat.messages)):
        return chat
    messages = [_told(message) for message in chat.messages]
    if chat.tools:
        text = "\n".join([_ASKS, *(_json(tool["function"]) for tool in chat.tools)])
        if messages and messages[0].role == "system":
            first = messages.pop(0)
            text = f"{first.content or ''}\n\n{text}".lstrip()
        messages.insert(0, Message("system", text))
    return replace(chat, messages=tuple(messages))


def _told(message: Message) -> Message:
    if message.role == "tool":
        of = message.name or message.tool_call_id
        return Message("user", f"Result of the call {of}:\n{message.content or ''}")
    if message.tool_calls:
        calls = _json([_call(call) for call in message.tool_calls])
        content = f"{message.content or ''}\n{calls}".lstrip()
        return replace(message, content=content, tool_calls=())
    return message


def _call(call: ToolCall) -> dict[str, Any]:
    return {"name": call.name, "arguments": call.arguments}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

"""Tells a model of tools in words, where its chat template does not.

The tools stand in the system message, or in the first message of the user, and earlier calls and
their results are messages of their own. The model is asked for the format that the parser `json`
reads.

A template may also take tools and show no earlier calls, or no results of them. Then the calls are
written as the model wrote them, and the results are messages of the user.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from tandem.router.request.conversation import Conversation, Message, ToolCall

_ASKS = (
    "You may call functions. To call some, answer with nothing but a JSON list of objects "
    'such as {"name": "FUNCTION", "arguments": {...}}. These are the functions:'
)


def with_told_tools(chat: Conversation, *, takes_system: bool = True) -> Conversation:
    """Returns the chat as a template without tools can render it; the tools are still its own.
    Without `takes_system` the first message of the user tells of the tools.

    One without tools and calls is as it was: the template knows it.
    """
    if not (chat.tools or any(message.tool_calls for message in chat.messages)):
        return chat
    messages = _with_told_results(map(_with_told_calls, chat.messages))
    if chat.tools:
        text = "\n".join([_ASKS, *(_json(tool["function"]) for tool in chat.tools)])
        if not takes_system:
            roles = [message.role for message in messages]
            at = roles.index("user") if "user" in roles else len(messages)
            messages[at : at + 1] = [_joined(Message("user", text), *messages[at : at + 1])]
        else:
            if messages and messages[0].role == "system":
                first = messages.pop(0)
                text = f"{first.content or ''}\n\n{text}".lstrip()
            messages.insert(0, Message("system", text))
    return replace(chat, messages=tuple(messages))


def with_told_results(chat: Conversation) -> Conversation:
    """Returns the chat with results of calls as messages of the user."""
    return replace(chat, messages=tuple(_with_told_results(chat.messages)))


def with_written_calls(
    chat: Conversation, write: Callable[[list[tuple[str, Mapping[str, Any]]]], str]
) -> Conversation:
    """Returns the chat with earlier calls as text of their messages, if `write` returns any."""

    def written(message: Message) -> Message:
        calls = [(call.name, call.arguments) for call in message.tool_calls]
        if not calls or not (text := write(calls)):
            return message
        content = f"{message.content or ''}\n{text}".lstrip()
        return replace(message, content=content, parts=(), tool_calls=())

    return replace(chat, messages=tuple(map(written, chat.messages)))


def _joined(first: Message, *then: Message) -> Message:
    """Returns one message of the user with the contents of several."""
    return Message("user", "\n\n".join(message.content or "" for message in (first, *then)))


def _with_told_results(messages: Iterable[Message]) -> list[Message]:
    given: list[Message] = []
    earlier = ""  # the role of the message before
    for message in messages:
        role = message.role
        if role == "tool":
            of = message.name or message.tool_call_id
            message = Message("user", f"Result of the call {of}:\n{message.content or ''}")
        # Some templates refuse two messages of the user in a row.
        if earlier == "tool" and message.role == "user":
            message = _joined(given.pop(), message)
        given.append(message)
        earlier = role
    return given


def _with_told_calls(message: Message) -> Message:
    if not message.tool_calls:
        return message
    calls = _json([_call(call) for call in message.tool_calls])
    content = f"{message.content or ''}\n{calls}".lstrip()
    return replace(message, content=content, parts=(), tool_calls=())


def _call(call: ToolCall) -> dict[str, Any]:
    return {"name": call.name, "arguments": call.arguments}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

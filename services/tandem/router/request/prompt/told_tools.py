"""Writes tools, calls and results as text into a chat whose template does not support them.

- If the template does not support tools, the system message or the user's first message lists the
  tools, and instructs the model to write calls in the format of the parser `json`. Earlier calls
  and results of calls become ordinary messages.
- If the template supports tools but does not show earlier calls, the calls are written into their
  messages in the model's own format.
- If the template supports tools but does not show the results of calls, the results become messages
  of the user.
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


def with_described_tools(chat: Conversation, *, takes_system: bool = True) -> Conversation:
    """Returns the chat with tools, calls and results written as text into its messages.

    The field `tools` stays unchanged. The tools are described in the system message if
    `takes_system` is True, else in the user's first message. A chat without tools and calls is
    returned unchanged.
    """
    if not (chat.tools or any(message.tool_calls for message in chat.messages)):
        return chat
    messages = _with_results_as_text(map(_with_calls_as_text, chat.messages))
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


def with_described_results(chat: Conversation) -> Conversation:
    """Returns the chat with each result of a tool call as a message of the user."""
    return replace(chat, messages=tuple(_with_results_as_text(chat.messages)))


def with_written_calls(
    chat: Conversation, write: Callable[[list[tuple[str, Mapping[str, Any]]]], str]
) -> Conversation:
    """Returns the chat with earlier tool calls as text in their messages.

    Calls for which `write` returns "" stay unchanged.
    """

    def written(message: Message) -> Message:
        calls = [(call.name, call.arguments) for call in message.tool_calls]
        if not calls or not (text := write(calls)):
            return message
        content = f"{message.content or ''}\n{text}".lstrip()
        return replace(message, content=content, parts=(), tool_calls=())

    return replace(chat, messages=tuple(map(written, chat.messages)))


def _joined(first: Message, *then: Message) -> Message:
    """Returns one user message with the contents of several messages."""
    return Message("user", "\n\n".join(message.content or "" for message in (first, *then)))


def _with_results_as_text(messages: Iterable[Message]) -> list[Message]:
    converted: list[Message] = []
    previous_role = ""  # the previous message's original role, before it became a user message
    for message in messages:
        role = message.role
        if role == "tool":
            call = message.name or message.tool_call_id
            message = Message("user", f"Result of the call {call}:\n{message.content or ''}")
        # Some templates reject two consecutive user messages.
        if previous_role == "tool" and message.role == "user":
            message = _joined(converted.pop(), message)
        converted.append(message)
        previous_role = role
    return converted


def _with_calls_as_text(message: Message) -> Message:
    if not message.tool_calls:
        return message
    calls = _json([_call(call) for call in message.tool_calls])
    content = f"{message.content or ''}\n{calls}".lstrip()
    return replace(message, content=content, parts=(), tool_calls=())


def _call(call: ToolCall) -> dict[str, Any]:
    return {"name": call.name, "arguments": call.arguments}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

"""Moves lines that are known to vary from the system prompt to the first message of the user.

Some clients write the date or the time into the system prompt. KV is reused only up to the first
token that differs, so a new date prevents the reuse of the rest of the system prompt and of all
tools. With `--varying-lines move`, these lines come after both. docs/turns.md has the list.
"""

import re
from dataclasses import replace

from tandem.router.request.conversation import Conversation, Message
from tandem.router.request.request import ClientRequest

# A whole line has one of these forms. `{when}` stands for what is told, with a digit in it.
VARYING_LINES = (
    "Today's date: {when}",
    "Today's date is {when}",
    "Today is {when}",
    "Current date: {when}",
    "Current time: {when}",
    "Current date and time: {when}",
    "The current date is {when}",
    "The current time is {when}",
    "The current date and time is {when}",
)
_LINE = re.compile(
    rf"^[ \t]*(?:[-*] )?(?:{'|'.join(VARYING_LINES)})[ \t]*(?:\n|\Z)".replace(
        "{when}", r"[^\n]{0,40}\d[^\n]{0,60}"
    ),
    re.MULTILINE | re.IGNORECASE,
)


def with_lines_moved(request: ClientRequest) -> ClientRequest:
    """Returns the request with its known varying lines moved. Only chats are changed."""
    if not isinstance(request.prompt, Conversation):
        return request
    pinned = request.pinned_chat
    return replace(
        request,
        prompt=move_lines(request.prompt),
        pinned_chat=None if pinned is None else move_lines(pinned),
    )


def move_lines(chat: Conversation) -> Conversation:
    """Moves the varying lines of the system messages at the beginning of a chat to the beginning of
    the first user message. A chat without a user message after them is not changed."""
    messages = list(chat.messages)
    lines: list[str] = []
    for index, message in enumerate(messages):
        if message.role == "user":
            if not lines:
                break
            messages[index] = _with_beginning(message, "\n".join(lines))
            return replace(chat, messages=tuple(messages))
        if message.role != "system":
            break
        messages[index] = _without_lines(message, lines)
    return chat


def _without_lines(message: Message, lines: list[str]) -> Message:
    """Returns the message without varying lines, and appends these to `lines`."""

    def cut(text: str) -> str:
        lines.extend(found.strip() for found in _LINE.findall(text))
        return _LINE.sub("", text)

    if not message.parts:
        return replace(message, content=cut(message.content or ""))
    parts = [cut(part) if isinstance(part, str) else part for part in message.parts]
    return replace(Message.of_parts(message.role, parts), name=message.name)


def _with_beginning(message: Message, text: str) -> Message:
    if not message.parts:
        return replace(message, content=f"{text}\n\n{message.content or ''}")
    first, *others = message.parts
    parts = [f"{text}\n\n{first}", *others] if isinstance(first, str) else [text, *message.parts]
    return replace(Message.of_parts(message.role, parts), name=message.name)

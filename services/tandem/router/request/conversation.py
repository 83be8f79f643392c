"""Defines chat requests: their messages, their tools, and the chat template's input."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Literal, Self

from tandem.common.printable import shorten
from tandem.errors import BadRequest
from tandem.router.request.allowed import TOOLS_MAX, refusal

# Any role of this form is passed to the chat template, because a template may support additional
# roles such as `control`. The allowed characters cannot spell a special token.
_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
NESTING_MAX = 64  # largest nesting depth of a tool's schema or a call's arguments


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call in an earlier answer of the model."""

    id: str
    name: str
    arguments: Mapping[str, Any]

    def template_input(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class SentImage:
    """An image in a message, as the client sent it."""

    url: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str | None  # None: the message is an assistant message with only tool calls
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""  # name of the speaker, or of a tool's function
    reasoning: str = ""
    # The texts and images, if the client sent the content as a list of them. `content` then has all
    # texts, joined by line breaks as in vLLM.
    parts: tuple[str | SentImage, ...] = field(default=(), compare=False)

    @classmethod
    def of_parts(cls, role: str, parts: Sequence[str | SentImage], **fields: Any) -> Self:
        """Returns a message whose content was sent as a list of texts and images."""
        text = "\n".join(part for part in parts if isinstance(part, str))
        return cls(role, text, parts=tuple(parts), **fields)

    def __post_init__(self) -> None:
        if not _ROLE.fullmatch(self.role):
            raise BadRequest(
                f"role is {shorten(self.role)}; it must be system, user, assistant, tool, or "
                "another role of the chat template, with 1 to 64 letters, digits, _ and -",
                param="messages",
            )

    @property
    def images(self) -> list[SentImage]:
        return [part for part in self.parts if isinstance(part, SentImage)]

    def template_input(self) -> dict[str, Any]:
        """Returns the message for `ChatTemplate.render`, with only the fields that were sent."""
        content: Any = self.content
        if len(self.parts) > 1 or self.images:
            content = [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
                for part in self.parts
            ]
        given: dict[str, Any] = {"role": self.role, "content": content}
        if self.tool_calls:
            given["tool_calls"] = [call.template_input() for call in self.tool_calls]
        sent = {
            "tool_call_id": self.tool_call_id,
            "name": self.name,
            "reasoning_content": self.reasoning,
        }
        return given | {name: value for name, value in sent.items() if value}


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages and tools of a chat, from which the model's chat template makes the prompt.

    Field that is True          End of the prompt
    `add_generation_prompt`     the header of a new assistant message
    `continue_final_message`    the last message without its end; the answer continues it
    neither                     the end of the last message
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()  # definitions of tools, as the client sent them
    tool_choice: Literal["auto", "none", "required"] = "auto"
    # With `tool_choice` "required": name of the only function that the answer may call. "": the
    # answer may call all functions of `tools`.
    only_tool: str = ""
    # Names of the functions of `tools` that the answer may call. None: all.
    allowed_tools: frozenset[str] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    thinking: bool | None = None  # whether the model shall reason; None: the model's default
    template_options: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    # True: the tokenizer adds special tokens, such as a bos token, to the text of the template.
    add_special_tokens: bool = False

    def __post_init__(self) -> None:
        if self.add_generation_prompt and self.continue_final_message:
            raise refusal("add_generation_prompt", why="true")
        if len(self.tools) > TOOLS_MAX:
            raise refusal("tools", why=f"a list of {len(self.tools)} tools")
        if self.tool_choice == "required" and not self.tools:
            raise BadRequest(
                'tool_choice must be "auto" or "none", because the request has no tools',
                param="tool_choice",
            )
        if self.only_tool and not self.callable_tools:
            raise BadRequest(
                f"{refusal('tool_choice').message}; the request has no tool with the name "
                f"{shorten(self.only_tool)}",
                param="tool_choice",
            )
        if self.tool_choice == "required" and not self.callable_tools:
            raise BadRequest(
                f"{refusal('tool_choice').message}; the request has no tool with the name "
                f"{' or '.join(map(shorten, sorted(self.allowed_tools or ())))}",
                param="tool_choice",
            )
        calls = [c.arguments for m in self.messages for c in m.tool_calls]
        for name, value in (
            ("tools", self.tools),
            ("messages", calls),
            ("chat_template_kwargs", self.template_options),
        ):
            if not _is_nested_within(value, NESTING_MAX + 2):
                message = f"{name} has values that are nested deeper than {NESTING_MAX} levels"
                raise BadRequest(message, param=name)

    @property
    def callable_tools(self) -> tuple[Mapping[str, Any], ...]:
        """The tools that the answer may call."""
        if self.tool_choice == "none":
            return ()
        if self.only_tool:
            named = (tool for tool in self.tools if tool["function"]["name"] == self.only_tool)
            return tuple(named)[:1]
        if self.allowed_tools is None:
            return self.tools
        return tuple(tool for tool in self.tools if tool["function"]["name"] in self.allowed_tools)

    @property
    def images(self) -> list[SentImage]:
        """The images of all messages, in their order."""
        return [image for message in self.messages for image in message.images]

    @property
    def continued(self) -> str | None:
        """The content that the answer continues; None if the answer is a new message.

        An answer with forced tool calls is always a new message.
        """
        if not self.continue_final_message or self.tool_choice == "required":
            return None
        return self.messages[-1].content or ""

    @property
    def one_call_only(self) -> bool:
        """True if the answer ends after the first tool call."""
        return bool(self.only_tool) or not self.parallel_tool_calls

    def template_input(
        self,
    ) -> tuple[list[dict[str, Any]], list[Mapping[str, Any]] | None, Mapping[str, Any]]:
        """Returns the arguments (messages, tools, options) of `Tokenizer.render_prompt`."""
        messages = [message.template_input() for message in self.messages]
        return messages, list(self.tools) or None, self.template_options

    @property
    def beginning(self) -> Self | None:
        """A chat with the system prompt and the tools of this one, and another user message. None:
        this chat has neither. The prompts of both have the same first tokens."""
        system = tuple(takewhile(lambda message: message.role == "system", self.messages))
        if not system and not self.tools:
            return None
        return replace(
            self,
            messages=(*system, Message("user", "?")),
            add_generation_prompt=False,
            continue_final_message=False,
        )

    @property
    def num_characters(self) -> int:
        beyond = sum(map(_num_characters, (self.tools, self.template_options)))
        return beyond + sum(
            len(m.content or "")
            + len(m.reasoning)
            + sum(len(c.name) + _num_characters(c.arguments) for c in m.tool_calls)
            for m in self.messages
        )


def _num_characters(value: Any) -> int:
    """Estimates the number of characters of a value written as JSON, without punctuation."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_num_characters(k) + _num_characters(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return sum(map(_num_characters, value))
    return 1


def _is_nested_within(value: Any, levels: int) -> bool:
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return True
    return levels > 0 and all(_is_nested_within(item, levels - 1) for item in value)

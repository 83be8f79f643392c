"""Request bodies of Anthropic's Messages API, and their conversion to bodies of OpenAI's chat API,
which `openai.requests` parses.

A message of the user can have several content blocks, which become one or more chat messages. For
example, the blocks tool_result, tool_result, text, text become three chat messages:

  blocks        chat message
  tool_result   a message with the role `tool`
  tool_result   a message with the role `tool`
  text, text    one message with the role `user`

All blocks of an assistant's message become one message with the role `assistant`.

https://platform.claude.com/docs/en/api/messages
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from tandem.api.openai.fields import FieldPolicy, each
from tandem.api.openai.files import decode_text
from tandem.api.openai.parsed import ParsedRequest
from tandem.api.openai.requests import parse_chat, validate
from tandem.api.openai.structured import Strict, StructuredOutputs
from tandem.api.openai.tools import arguments_of, drop_tools, kind_of, leave_out_media
from tandem.common.printable import shorten
from tandem.common.retention import PRIORITY_DEFAULT
from tandem.errors import BadRequest, ThreadNotFound
from tandem.router.request.allowed import ALLOWED
from tandem.router.request.conversation import Conversation
from tandem.router.request.retention import TTLS_S
from tandem.router.request.session import session_in_user_id

# Names of fields in OpenAI's chat API -> names of the corresponding fields in this API. Error
# messages use the names of this API.
NAMES = {
    "continue_final_message": "messages",
    "reasoning_effort": "output_config",
    "response_format": "output_config",
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice",
}
# The same, for the header `warning`.
HINT_NAMES = {"reasoning_effort": "output_config.effort"}
_POLICY = FieldPolicy(
    records=frozenset(
        (
            *("betas", "diagnostics", "inference_geo", "service_tier"),
            *("user_profile_id", "workspace_id"),
        )
    ),
    # `container` and `mcp_servers` are about tools that Anthropic's servers run.
    hints={
        **each("container", "mcp_servers"),
        "speed": ("standard",),
    },
)
_ALLOWED = {
    "messages": "a non-empty list of messages, each with a role (user, assistant or system) and a "
    "content that is a string or a list of blocks: text, tool_use and thinking (of an assistant), "
    "image, document, search_result and tool_result (of a user)",
    "system": "a string or a list of text blocks",
    "max_tokens": "an integer of at least 1, or 0 to cache the prompt without an answer",
    "stop_sequences": ALLOWED["stop"],
    "tools": 'a list of tools such as {"name": ..., "description": ..., "input_schema": {...}}; '
    "tools that Anthropic's servers run are not supported",
    "tool_choice": 'an object with the type "auto", "any", "tool" (with name) or "none"',
    "thinking": 'an object with the type "enabled", "disabled", "adaptive" or "between_tools"',
    "context_management": "an object with edits of thinking, or edits that do not change the "
    'conversation, such as {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}',
    "thread": 'an object with the type "create", or with the type "continue" and a '
    "previous_message_id",
    "output_config": 'an object with effort, such as "low", and format, such as '
    '{"type": "json_schema", "schema": {...}}',
    "output_format": 'an object such as {"type": "json_schema", "schema": {...}}; it cannot be '
    "sent together with output_config.format, its newer name",
    "cache_control": 'an object with the type "ephemeral" and a ttl of "5m" or "1h"',
}
_TEXTS = ("text", "document", "search_result")  # types of blocks that become text
_RESULTS = (*_TEXTS, "tool_reference")  # the same, in the result of a tool
_KINDS = {
    "system": ("text", "tool_addition", "tool_removal"),
    "user": (*_TEXTS, "image", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
}
# Types of blocks that say what tools of Anthropic's servers did, and of thinking that only these
# servers can read. They are left out. So are blocks whose type ends with _SERVER_RESULT.
_LEFT_OUT = (
    *("redacted_thinking", "server_tool_use", "mcp_tool_use", "container_upload"),
    *("mcp_tool_listing", "fallback"),
)
_SERVER_RESULT = "_tool_result"


# Claude Code puts a block with this beginning before its system prompt. The block differs in each
# conversation, so no other prompt would share its KV; it is not for the model.
_BILLING = "x-anthropic-billing-header:"


class _Part(Strict):
    """A part of a body. It ignores further keys."""

    model_config = ConfigDict(strict=True, extra="ignore")


class CacheControl(_Part):
    """Marks the end of a part of the prompt that the client wants cached. Every prompt is cached,
    and the part before the last mark is pinned. `scope` has no effect: the requests of a tenant
    share their cache."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"
    scope: str | None = None


class _Markable(_Part):
    cache_control: CacheControl | None = None

    def marks(self) -> list[CacheControl]:
        """Returns the `cache_control` marks of this object and of the objects inside it."""
        return [] if self.cache_control is None else [self.cache_control]


def _wrong(message: str, **about: object) -> PydanticCustomError:
    return PydanticCustomError("unsupported", message, about)


_ALL_KINDS = tuple(sorted({kind for kinds in _KINDS.values() for kind in kinds}))


def _as_blocks(content: object, allowed: tuple[str, ...] = _ALL_KINDS) -> object:
    """Converts a string to a list of one text block. Raises an error if a block has a type that is
    not allowed."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    for index, block in enumerate(content if isinstance(content, list) else ()):
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind not in allowed:
            raise _wrong(
                "block {index} has the type {kind}; allowed are {allowed}",
                index=index,
                kind=repr(kind[:40]),
                allowed=", ".join(allowed),
            )
    return content


class TextBlock(_Markable):
    type: Literal["text"]
    text: str


_SystemTexts = Annotated[
    list[TextBlock], BeforeValidator(lambda content: _as_blocks(content, ("text",)))
]


def _without_billing(system: object) -> object:
    match system:
        case [{"type": "text", "text": str(text)}, *others] if text.startswith(_BILLING):
            return others
    return system


class _TextSource(_Part):
    type: Literal["text"]
    data: str

    @property
    def text(self) -> str:
        return self.data


class _FileSource(_Part):
    type: Literal["base64"]
    media_type: str
    data: str

    @property
    def text(self) -> str:
        return decode_text(self.data, self.media_type)


class _ContentSource(_Part):
    type: Literal["content"]
    content: _SystemTexts

    @property
    def text(self) -> str:
        return _text(self.content)


def _check_document(source: object) -> object:
    kind = kind_of(source)
    if kind is not None and kind not in ("text", "base64", "content"):
        raise _wrong(
            "the source of a document has the type {kind}; allowed are text, content and base64, "
            "because documents of other servers are not fetched",
            kind=repr(kind[:40]),
        )
    return source


class DocumentBlock(_Markable):
    """A document, which becomes a text of its title, its context and its own text. The answer has
    no citations."""

    type: Literal["document"]
    source: Annotated[
        Annotated[_TextSource | _FileSource | _ContentSource, Field(discriminator="type")],
        BeforeValidator(_check_document),
    ]
    title: str | None = None
    context: str | None = None

    @model_validator(mode="after")
    def _check_text(self) -> Self:
        _ = self.text
        return self

    @property
    def text(self) -> str:
        return "\n".join(filter(None, (self.title, self.context, self.source.text)))


class SearchResultBlock(_Markable):
    """A result of the client's own search, which becomes a text."""

    type: Literal["search_result"]
    source: str
    title: str
    content: _SystemTexts

    @property
    def text(self) -> str:
        return "\n".join((self.title, self.source, _text(self.content)))


class ToolReferenceBlock(_Markable):
    """A tool that the client's own search has found. Its definition is in `tools`."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        return f"The tool {self.tool_name} is available."


class Tool(_Markable):
    """A function of the client's own. Anthropic's other tools have a type with a date."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def to_chat(self) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.input_schema
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


def _check_tool(tool: object) -> object:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != "custom":
        raise _wrong(
            "the tool has the type {kind}; only tools that the client runs are supported",
            kind=repr(kind[:40]),
        )
    return tool


class _ToolByName(_Part):
    type: Literal["tool_reference"]
    name: str


class _ToolDefinition(_Part):
    type: Literal["tool_definition"]
    definition: Annotated[Tool, BeforeValidator(_check_tool)]

    @property
    def name(self) -> str:
        return self.definition.name


class ToolChangeBlock(_Markable):
    """A change of the tools within the conversation, which becomes a text. An added tool is one of
    the tools of the whole conversation, because chat templates write them before all messages."""

    type: Literal["tool_addition", "tool_removal"]
    tool: Annotated[_ToolByName | _ToolDefinition, Field(discriminator="type")]

    @property
    def text(self) -> str:
        is_added = self.type == "tool_addition"
        return f"The tool {self.tool.name} is {'now' if is_added else 'no longer'} available."


_TextLike = TextBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock | ToolChangeBlock


class ImageSource(_Part):
    type: Literal["base64"]
    media_type: str = Field(pattern=r"^image/[a-z0-9.+-]+$")
    data: str


def _check_source(source: object) -> object:
    kind = source.get("type") if isinstance(source, dict) else None
    if isinstance(kind, str) and kind != "base64":
        raise _wrong(
            "the source of an image has the type {kind}; it must be base64, because images of "
            "other servers are not fetched",
            kind=repr(kind[:40]),
        )
    return source


class ImageBlock(_Markable):
    type: Literal["image"]
    source: Annotated[ImageSource, BeforeValidator(_check_source)]

    def to_chat(self) -> dict[str, Any]:
        """Converts this block to a content part of OpenAI's chat API."""
        url = f"data:{self.source.media_type};base64,{self.source.data}"
        return {"type": "image_url", "image_url": {"url": url}}


class ThinkingBlock(_Part):
    """Thinking of an earlier answer. Its signature is not checked."""

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(_Markable):
    type: Literal["tool_use"]
    id: str
    name: str
    # A client may send the text of an input that was cut.
    input: dict[str, Any] | str


class ToolResultBlock(_Markable):
    """A tool's answer. Chat templates have no place for `is_error`; the content says what it is."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[
        list[Annotated[_TextLike, Field(discriminator="type")]],
        BeforeValidator(lambda sent: _as_blocks(sent or [], _RESULTS)),
    ] = []
    is_error: bool = False

    def marks(self) -> list[CacheControl]:
        """Returns the `cache_control` marks of the tool result and of the text blocks inside it."""
        return [*super().marks(), *(mark for text in self.content for mark in text.marks())]


Block = Annotated[
    _TextLike | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class InputMessage(_Part):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], BeforeValidator(_as_blocks)]

    @model_validator(mode="after")
    def _check_kinds(self) -> Self:
        if not self.content and self.role != "assistant":
            raise _wrong("the message must have content")
        for index, block in enumerate(self.content):
            if block.type not in _KINDS[self.role]:
                raise _wrong(
                    "block {index} has the type {kind}, which is not allowed in a message of the "
                    "role {role}",
                    index=index,
                    kind=repr(block.type),
                    role=self.role,
                )
        return self

    def to_chat(self) -> list[dict[str, Any]]:
        """Converts this message to one or more messages of OpenAI's chat API."""
        if self.role == "assistant":
            return [self._as_assistant()]
        messages: list[dict[str, Any]] = []
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                result = {"tool_call_id": block.tool_use_id, "content": _parts(block.content)}
                messages.append({"role": "tool", **result})
            elif isinstance(block, _TextLike | ImageBlock):
                if not messages or messages[-1]["role"] == "tool":
                    messages.append({"role": self.role, "content": []})
                messages[-1]["content"] += (
                    [block.to_chat()] if isinstance(block, ImageBlock) else _parts([block])
                )
        return messages

    def _as_assistant(self) -> dict[str, Any]:
        texts = [b for b in self.content if isinstance(b, TextBlock)]
        thoughts = [b.thinking for b in self.content if isinstance(b, ThinkingBlock)]
        calls = [_call(b) for b in self.content if isinstance(b, ToolUseBlock)]
        message: dict[str, Any] = {"role": "assistant", "content": _parts(texts) or None}
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        if not (texts or calls or "".join(thoughts)):  # an answer may be empty
            message["content"] = ""
        return message


class AnthropicToolChoice(_Part):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise _wrong('name must be set if type is "tool", and must not be set otherwise')
        return self

    def to_chat(self) -> str | dict[str, Any]:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class Thinking(_Part):
    """Whether the model reasons. Only `max_tokens` bounds the reasoning, and all of it is shown."""

    field_policy = FieldPolicy(hints=each("budget_tokens", "display"))

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]

    def wanted(self) -> bool | None:
        """Returns True if the client turns thinking on, False if it turns thinking off, and None if
        the chat template's default applies."""
        return {"enabled": True, "disabled": False}.get(self.type)


class OutputFormat(_Part):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(_Part):
    """`effort` is a hint, which a chat template may not take."""

    field_policy = FieldPolicy(hints=each("task_budget"))

    effort: str | None = None
    format: OutputFormat | None = None

    def to_chat(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self.effort is not None:
            fields["reasoning_effort"] = self.effort
        if self.format is not None:
            schema = {"name": "output", "schema": self.format.schema_, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields


class _Amount(_Part):
    type: Literal["input_tokens", "tool_uses", "thinking_turns", "all"]
    value: int = Field(0, ge=0)


_CHARACTERS_PER_TOKEN, _TOKENS_PER_IMAGE = 4, 1600  # estimated


class ClearThinking(_Part):
    """An edit that removes thinking from all but the last turns of the assistant with thinking. It
    is carried out: Claude Code sends it in each request after an hour without any."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | _Amount = _Amount(type="thinking_turns", value=1)

    def edited(self, messages: Sequence["InputMessage"]) -> list["InputMessage"]:
        """Returns the messages after the edit. A turn goes on after the result of a tool."""
        if self.keep == "all" or self.keep.type == "all":
            return [*messages]
        num_turns = 0  # those with thinking, from the last one on
        is_counted = False  # whether the current one is among them
        kept = []
        for message in reversed(messages):
            if message.role != "assistant":
                is_counted &= all(isinstance(block, ToolResultBlock) for block in message.content)
            elif any(isinstance(block, ThinkingBlock) for block in message.content):
                num_turns += not is_counted
                is_counted = True
                if num_turns > self.keep.value:
                    shown = [b for b in message.content if not isinstance(b, ThinkingBlock)]
                    message = message.model_copy(update={"content": shown})
            kept.append(message)
        return kept[::-1]


class ClearToolUses(_Part):
    """An edit that removes the oldest results of tools from a long conversation."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: _Amount = _Amount(type="input_tokens", value=100_000)
    keep: _Amount = _Amount(type="tool_uses", value=3)
    exclude_tools: list[str] = []

    def changes(self, messages: Sequence["InputMessage"]) -> bool:
        uses = [block for m in messages for block in m.content if isinstance(block, ToolUseBlock)]
        num_clearable = sum(block.name not in self.exclude_tools for block in uses)
        if num_clearable <= self.keep.value:
            return False
        if self.trigger.type == "tool_uses":
            return len(uses) > self.trigger.value
        return _is_longer(messages, self.trigger.value)


class Compact(_Part):
    """An edit that replaces a long conversation by a summary."""

    type: Literal["compact_20260112"]
    trigger: _Amount = _Amount(type="input_tokens", value=150_000)

    def changes(self, messages: Sequence["InputMessage"]) -> bool:
        return _is_longer(messages, self.trigger.value)


def _is_longer(messages: Sequence["InputMessage"], num_tokens: int) -> bool:
    """Estimates whether the messages have more tokens than `num_tokens`."""
    blocks = [block for m in messages for block in m.content]
    # The tokens of an image do not depend on its bytes.
    images = [block for block in blocks if isinstance(block, ImageBlock)]
    num_characters = sum(
        len(block.model_dump_json()) for block in blocks if not isinstance(block, ImageBlock)
    )
    num = len(images) * _TOKENS_PER_IMAGE + num_characters // _CHARACTERS_PER_TOKEN
    return num > num_tokens


_EDITS = ("clear_thinking_20251015", "clear_tool_uses_20250919", "compact_20260112")


def _check_edit(edit: object) -> object:
    kind = kind_of(edit)
    if kind is not None and kind not in _EDITS:
        raise _wrong(
            "the edit has the type {kind}; allowed are {allowed}",
            kind=repr(kind[:40]),
            allowed=", ".join(_EDITS),
        )
    return edit


class ContextManagement(_Part):
    edits: list[
        Annotated[
            Annotated[ClearThinking | ClearToolUses | Compact, Field(discriminator="type")],
            BeforeValidator(_check_edit),
        ]
    ] = []

    def edited(self, messages: list["InputMessage"]) -> list["InputMessage"]:
        """Returns the messages after all edits. Raises BadRequest for an edit that would change
        them and is not carried out."""
        for index, edit in enumerate(self.edits):
            if isinstance(edit, ClearThinking):
                messages = edit.edited(messages)
            elif edit.changes(messages):
                raise BadRequest(
                    f"context_management must be {_ALLOWED['context_management']} "
                    f"(context_management.edits.{index}: {edit.type} would change this "
                    "conversation; leave it out, and shorten the conversation in the client)",
                    param="context_management",
                )
        return messages


class Thread(_Part):
    """A conversation that the client wants the server to keep. Tandem keeps none."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None

    @model_validator(mode="after")
    def _check_previous(self) -> Self:
        if self.type == "continue" and not self.previous_message_id:
            raise _wrong('a thread of the type "continue" needs a previous_message_id')
        return self

    def find(self) -> None:
        """Raises ThreadNotFound if the client wants to continue a thread, because this server keeps
        none. Clients then send the whole conversation again."""
        if self.type == "continue":
            raise ThreadNotFound(
                "this server keeps no conversations, so no thread can continue after the message "
                f"{shorten(self.previous_message_id)}. Send all messages of the conversation "
                'without the field thread, or with a thread of the type "create"',
                param="thread",
            )


class CountTokensBody(Strict):
    """The fields that say what the prompt is."""

    field_policy = _POLICY
    allowed = _ALLOWED
    parts = {
        "output_config": OutputConfig,
        "thinking": Thinking,
        "context_management": ContextManagement,
        "structured_outputs": StructuredOutputs,
    }

    model: str = Field("", description=ALLOWED["model"])
    messages: list[InputMessage] = Field(description=_ALLOWED["messages"])
    system: Annotated[_SystemTexts, BeforeValidator(_without_billing)] = Field(
        [], description=_ALLOWED["system"]
    )
    tools: list[Annotated[Tool, BeforeValidator(_check_tool)]] = Field(
        [], description=_ALLOWED["tools"]
    )
    tool_choice: AnthropicToolChoice | None = Field(None, description=_ALLOWED["tool_choice"])
    thinking: Thinking | None = Field(None, description=_ALLOWED["thinking"])
    output_config: OutputConfig | None = Field(None, description=_ALLOWED["output_config"])
    output_format: OutputFormat | None = Field(None, description=_ALLOWED["output_format"])
    cache_control: CacheControl | None = Field(None, description=_ALLOWED["cache_control"])
    context_management: ContextManagement | None = Field(
        None, description=_ALLOWED["context_management"]
    )
    thread: Thread | None = Field(None, description=_ALLOWED["thread"])
    metadata: Any = None  # only a session in its `user_id` has an effect

    @classmethod
    def leave_out(cls, body: dict[str, Any]) -> list[str]:
        """Removes tools that Anthropic's servers run, and what they did in earlier answers."""
        dropped = [f"tools.{name}" for name in drop_tools(body, ("custom",))]
        messages = body.get("messages")
        kept = []
        for message in messages if isinstance(messages, list) else ():
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, list):
                blocks = [block for block in content if not _is_left_out(block)]
                dropped += [f"messages.{block['type']}" for block in content if _is_left_out(block)]
                for block in blocks:
                    if isinstance(block, dict) and block.pop("citations", None):
                        dropped.append("messages.citations")
                    if kind_of(block) == "tool_result":
                        media = leave_out_media(block, "content", "text")
                        dropped += [f"messages.tool_result.{kind}" for kind in media]
                if content and not blocks:
                    continue
                message["content"] = blocks
            kept.append(message)
        if isinstance(messages, list):
            body["messages"] = kept
        return dropped

    def _all_tools(self) -> list[Tool]:
        """Returns the tools, and those that messages add."""
        names = {tool.name for tool in self.tools}
        added = {
            block.tool.name: block.tool.definition
            for message in self.messages
            for block in message.content
            if isinstance(block, ToolChangeBlock)
            and isinstance(block.tool, _ToolDefinition)
            and block.tool.name not in names
        }
        return [*self.tools, *added.values()]

    def pin_s(self) -> float:
        """Returns the longest time to live of the request's `cache_control` marks, in seconds.
        Returns 0 if there are no marks."""
        blocks = [block for message in self.messages for block in message.content]
        parts = [
            part for part in (*self.system, *self.tools, *blocks) if isinstance(part, _Markable)
        ]
        marks = [mark for part in parts for mark in part.marks()]
        marks += [] if self.cache_control is None else [self.cache_control]
        return max((TTLS_S[mark.ttl] for mark in marks), default=0.0)

    def pinned(self) -> Self | None:
        """Returns a copy of this request without the blocks after the last `cache_control` mark.
        The prompt of the copy is the prefix to pin in the KV cache. If only tools or the system
        message have marks, the prefix is all tools and the whole system message.

        Returns None if the request has no mark, or if its own field `cache_control` marks the whole
        prompt.
        """
        if self.cache_control is not None:
            return None
        for index, message in reversed(list(enumerate(self.messages))):
            if marked := [i for i, block in enumerate(message.content) if _is_marked(block)]:
                cut = message.model_copy(update={"content": message.content[: marked[-1] + 1]})
                return self.model_copy(update={"messages": [*self.messages[:index], cut]})
        if any(map(_is_marked, (*self.system, *self.tools))):
            # Some chat templates write the system message into the first user message. So the copy
            # has an empty user message.
            nothing = InputMessage(role="user", content=[TextBlock(type="text", text="")])
            return self.model_copy(update={"messages": [nothing]})
        return None

    def to_chat(self) -> dict[str, Any]:
        """Converts the fields that determine the prompt to a body of OpenAI's chat API. If the
        assistant's text is the last message, the model continues that message."""
        messages = [{"role": "system", "content": _text(self.system)}] if self.system else []
        for message in self.messages:
            messages += message.to_chat()
        chat: dict[str, Any] = {"model": self.model, "messages": messages}
        last = messages[-1] if messages else {}
        # Where an answer was cut in its thinking, a new answer begins.
        if last.get("role") == "assistant" and last["content"] and "tool_calls" not in last:
            chat["continue_final_message"] = True
        if tools := self._all_tools():
            chat["tools"] = [tool.to_chat() for tool in tools]
        if self.tool_choice is not None:
            chat["tool_choice"] = self.tool_choice.to_chat()
            chat["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        config = self.output_config or OutputConfig()
        if self.output_format is not None:
            if config.format is not None:
                raise BadRequest(
                    "output_format and output_config.format cannot both be sent; send only the "
                    "newer output_config.format",
                    param="output_format",
                )
            config = config.model_copy(update={"format": self.output_format})
        return chat | config.to_chat()


class MessagesBody(CountTokensBody):
    max_tokens: int = Field(description=_ALLOWED["max_tokens"])
    stop_sequences: list[str] = Field([], description=_ALLOWED["stop_sequences"])
    stream: bool = Field(False, description=ALLOWED["stream"])
    temperature: float = Field(1.0, description=ALLOWED["temperature"])
    top_p: float = Field(1.0, description=ALLOWED["top_p"])
    top_k: int = Field(0, description=ALLOWED["top_k"])
    kv_priority: int = Field(PRIORITY_DEFAULT, description=ALLOWED["kv_priority"])
    priority: int | None = Field(None, description=ALLOWED["priority"])
    # an addition of vLLM to OpenAI's APIs
    structured_outputs: StructuredOutputs | None = Field(
        None, description=ALLOWED["structured_outputs"]
    )

    def to_chat(self) -> dict[str, Any]:
        """Converts the whole request, with its sampling options, to a body of OpenAI's chat API."""
        same = {"stream", "temperature", "top_p", "top_k", "kv_priority", "priority"}
        chat = {
            **super().to_chat(),
            **{name: getattr(self, name) for name in same & self.model_fields_set},
            "max_tokens": self.max_tokens or 1,
            "stop": self.stop_sequences,
        }
        if self.structured_outputs is not None:
            chat["structured_outputs"] = self.structured_outputs.told()
        return chat


def parse_messages(body: dict[str, Any], request_id: str) -> ParsedRequest:
    """Parses the body of `POST /v1/messages`. Raises BadRequest. Some of these errors name fields
    of OpenAI's chat API; `NAMES` has the names that the fields have in this API."""
    return _parse(validate(MessagesBody, body), request_id)


def parse_count(body: dict[str, Any], request_id: str) -> ParsedRequest:
    """Parses the body of `POST /v1/messages/count_tokens`. Raises the same errors as
    `parse_messages`."""
    return _parse(validate(CountTokensBody, body), request_id)


def without_effect(body: dict[str, Any]) -> list[str]:
    """Returns the names of the fields of a parsed body that have no effect because of their values:
    a thread that is created, and edits that would change another conversation."""
    edits = (body.get("context_management") or {}).get("edits") or ()
    are_hints = any(edit["type"] != "clear_thinking_20251015" for edit in edits)
    is_hint = {"thread": body.get("thread"), "context_management": are_hints}
    return [name for name, is_true in is_hint.items() if is_true]


def _parse(body: CountTokensBody, request_id: str) -> ParsedRequest:
    if body.thread is not None:
        body.thread.find()
    if body.context_management is not None:
        edited = body.context_management.edited(body.messages)
        body = body.model_copy(update={"messages": edited})
    parsed = parse_chat(body.to_chat(), request_id)
    (request,) = parsed.requests
    thinking = body.thinking.wanted() if body.thinking is not None else None
    assert isinstance(request.prompt, Conversation)
    chat = replace(request.prompt, thinking=thinking)
    retention = msgspec.structs.replace(request.retention, pin_s=body.pin_s())
    user_id = body.metadata.get("user_id") if isinstance(body.metadata, dict) else None
    session = session_in_user_id(user_id)
    marked = replace(request, prompt=chat, retention=retention, session=session)
    if isinstance(body, MessagesBody) and body.max_tokens == 0:
        sampling = msgspec.structs.replace(request.sampling, max_tokens=0)
        marked = replace(marked, sampling=sampling, may_be_empty=True)
    if (pinned := body.pinned()) is not None:
        begins = parse_chat(pinned.to_chat(), request_id).requests[0].prompt
        messages = begins.messages if isinstance(begins, Conversation) else ()
        part = replace(
            chat, messages=messages, add_generation_prompt=False, continue_final_message=False
        )
        marked = replace(marked, pinned_chat=part)
    return replace(parsed, requests=(marked,))


def _is_left_out(block: object) -> bool:
    kind = kind_of(block) or ""
    return kind in _LEFT_OUT or (kind.endswith(_SERVER_RESULT) and kind != _SERVER_RESULT[1:])


def _is_marked(part: object) -> bool:
    return isinstance(part, _Markable) and bool(part.marks())


def _text(blocks: list[TextBlock]) -> str:
    return "".join(block.text for block in blocks)


def _parts(blocks: Sequence[_TextLike]) -> list[dict[str, Any]]:
    """Converts text blocks to the content parts of a chat message."""
    return [{"type": "text", "text": block.text} for block in blocks]


def _call(block: ToolUseBlock) -> dict[str, Any]:
    sent = arguments_of(block.input) if isinstance(block.input, str) else block.input
    function = {"name": block.name, "arguments": json.dumps(sent)}
    return {"id": block.id, "type": "function", "function": function}

"""The input items of a request to the Responses API, and their conversion to chat messages.

The API has separate items for an assistant's reasoning, text and function calls. A chat has one
assistant message with all three. So consecutive items of the assistant become one message.

https://platform.openai.com/docs/api-reference/responses/create
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from tandem.api.openai.files import text_of_file
from tandem.api.openai.tools import arguments_of_input, kind_of, leave_out_media
from tandem.api.responses.tools import ToolName


class ContentPart(BaseModel):
    """A part of a body. It ignores unknown keys, because clients send items back as received."""

    model_config = ConfigDict(strict=True, extra="ignore")


def _wrong(message: str, **about: object) -> PydanticCustomError:
    return PydanticCustomError("unsupported", message, about)


_TEXTS = ("input_text", "output_text", "text")
_AS_TEXTS = ("input_file", "refusal")  # parts that become texts
_PARTS = (*_TEXTS, "input_image")


def _as_parts(content: object, allowed: tuple[str, ...] = _PARTS) -> object:
    """Converts a string to a list of one text part, and files and refusals to text parts. Raises an
    error for a part of a type that is not allowed."""
    if isinstance(content, str):
        return [{"type": "input_text", "text": content}]
    if not isinstance(content, list):
        return content
    content = [_as_text_part(part) for part in content]
    for index, part in enumerate(content):
        if (kind := kind_of(part)) is not None and kind not in allowed:
            raise _wrong(
                "part {index} has the type {kind}; allowed are {allowed}",
                index=index,
                kind=repr(kind[:40]),
                allowed=", ".join((*allowed, *_AS_TEXTS)),
            )
    return content


def _as_text_part(part: Any) -> Any:
    match part:
        case {"type": "refusal", "refusal": str(text)}:
            return {"type": "output_text", "text": text}
        case {"type": "input_file"}:
            return {"type": "input_text", "text": text_of_file(part)}
    return part


class ResponseTextPart(ContentPart):
    type: Literal["input_text", "output_text", "text"]
    text: str


class ResponseImagePart(ContentPart):
    """An image. `detail` is ignored: a model has one way of processing images."""

    type: Literal["input_image"]
    image_url: str


_Texts = Annotated[
    list[ResponseTextPart], BeforeValidator(lambda content: _as_parts(content, _TEXTS))
]
_Parts = Annotated[
    list[Annotated[ResponseTextPart | ResponseImagePart, Field(discriminator="type")]],
    BeforeValidator(_as_parts),
]


class MessageItem(ContentPart):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Parts


class FunctionCallItem(ContentPart):
    """A call of an earlier response."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class CustomCallItem(ContentPart):
    """A call of a tool of the type `custom` of an earlier response."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class FunctionCallOutputItem(ContentPart):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: _Texts


class ReasoningPart(ContentPart):
    text: str


class ReasoningItem(ContentPart):
    """Reasoning of an earlier response. `encrypted_content` of other servers has no effect."""

    type: Literal["reasoning"]
    summary: list[ReasoningPart] | None = None
    content: list[ReasoningPart] | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or self.summary or ())


_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = tuple(f"{kind}_output" for kind in _CALLS)
_KINDS = ("message", *_CALLS, *_OUTPUTS, "reasoning")
# Types of items that say what tools of OpenAI's servers did. They are left out.
_LEFT_OUT = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
    *("mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
    *("tool_search_call", "tool_search_output", "program", "program_output", "compaction"),
    *(
        f"{kind}_call{end}"
        for kind in ("computer", "local_shell", "shell", "apply_patch")
        for end in ("", "_output")
    ),
)


def leave_out_items(body: dict[str, Any]) -> list[str]:
    """Removes the items of tools that OpenAI's servers run, and images and files in the outputs of
    tools, from a body. Returns what was removed."""
    items = body.get("input")
    if not isinstance(items, list):
        return []
    body["input"] = [item for item in items if kind_of(item) not in _LEFT_OUT]
    dropped = [str(kind) for item in items if (kind := kind_of(item)) in _LEFT_OUT]
    for item in body["input"]:
        if kind_of(item) in _OUTPUTS:
            media = leave_out_media(item, "output", "input_text")
            dropped += [f"{item['type']}.{kind}" for kind in media]
    return dropped


def _as_items(sent: object) -> object:
    """Converts a string to a list of one user message. Raises an error for an item of an unknown
    type."""
    if isinstance(sent, str):
        return [{"type": "message", "role": "user", "content": sent}]
    items = []
    for index, item in enumerate(sent if isinstance(sent, list) else ()):
        if not isinstance(item, dict):
            return sent
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "agent_message":
            item, kind = _from_agent(item), "message"
        if isinstance(kind, str) and kind not in _KINDS:
            raise _wrong(
                "item {index} has the type {kind}, which is not supported",
                index=index,
                kind=repr(kind[:40]),
            )
        items.append({**item, "type": kind})
    return items if isinstance(sent, list) else sent


def _from_agent(item: dict[str, Any]) -> dict[str, Any]:
    """Converts a message that another agent of Codex has sent to a user's message. Its text names
    the sender. Encrypted parts are for OpenAI's servers."""
    content = item.get("content")
    if isinstance(content, list):
        content = [part for part in content if kind_of(part) != "encrypted_content"]
    return {**item, "role": "user", "content": content}


Item = Annotated[
    MessageItem | FunctionCallItem | CustomCallItem | FunctionCallOutputItem | ReasoningItem,
    Field(discriminator="type"),
]
Items = Annotated[list[Item], BeforeValidator(_as_items)]


def to_messages(items: Sequence[Item], names: Mapping[ToolName, str]) -> list[dict[str, Any]]:
    """Converts input items to the messages of a chat with the same content. `names` are the names
    that the request's tools have in the chat."""
    messages: list[dict[str, Any]] = []
    # the assistant's message to which the next item may be added; None: the last chat message is
    # not from the assistant
    turn: dict[str, Any] | None = None

    def assistant(*taken: str) -> dict[str, Any]:
        """Returns the assistant's message to which the next item is added. This is a new message if
        the last message is not the assistant's, or already has one of the keys `taken`."""
        nonlocal turn
        if turn is None or any(turn.get(key) is not None for key in taken):
            turn = {"role": "assistant", "content": None}
            messages.append(turn)
        return turn

    for item in items:
        if isinstance(item, ReasoningItem):
            if item.text:
                said = assistant("content", "tool_calls")
                said["reasoning_content"] = said.get("reasoning_content", "") + item.text
        elif isinstance(item, FunctionCallItem | CustomCallItem):
            sent = ToolName(item.name, item.namespace)
            arguments = (
                item.arguments
                if isinstance(item, FunctionCallItem)
                else arguments_of_input(item.input)
            )
            function = {"name": names.get(sent, item.name), "arguments": arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            assistant().setdefault("tool_calls", []).append(call)
        elif isinstance(item, FunctionCallOutputItem):
            turn = None
            content = _parts(item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        elif item.role == "assistant":
            assistant("content", "tool_calls")["content"] = _parts(item.content)
        else:
            turn = None
            messages.append({"role": item.role, "content": _parts(item.content)})
    return messages


def _parts(parts: Sequence[ResponseTextPart | ResponseImagePart]) -> list[dict[str, Any]]:
    """Converts texts and images to the content parts of a chat message."""
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, ResponseTextPart)
        else {"type": "image_url", "image_url": {"url": part.image_url}}
        for part in parts
    ]

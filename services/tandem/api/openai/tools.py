"""Tools, tool calls and reasoning in OpenAI's chats: in requests and in replies."""

import json
import re
from collections.abc import Container, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainValidator,
    TypeAdapter,
    model_validator,
)
from pydantic_core import PydanticCustomError

from tandem.api.openai.files import is_text
from tandem.common.surrogates import without_halves
from tandem.models.grammars.schema import without_nulls
from tandem.router.parsers.machine import CallDelta
from tandem.router.request.conversation import ToolCall


def _wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("unsupported", message)


# type of the tools whose only argument is text, such as a patch
CUSTOM = "custom"
# Types of parts that are no text, in all APIs -> what a tool's result has in their place. Files of
# text become text.
_MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image"), "(An image was left out here.)"),
    **dict.fromkeys(("document", "file", "input_file"), "(A file was left out here.)"),
    "browser_state": "",
}
_INPUT = "input"  # name of this argument, where such a tool is a function


def as_function(name: str, description: str | None, text_format: object) -> dict[str, Any]:
    """Builds the function that a tool of the type `custom` becomes, because models call functions
    only. `text_format` may have a grammar of the text, which becomes a part of the description."""
    parts = [description] if description else []
    match text_format:
        case {"type": "grammar", "syntax": str(syntax), "definition": str(definition)}:
            parts.append(f"The input follows this {syntax} grammar:\n{definition}")
    function: dict[str, Any] = {"name": name}
    if parts:
        function["description"] = "\n\n".join(parts)
    function["parameters"] = {
        "type": "object",
        "properties": {_INPUT: {"type": "string"}},
        "required": [_INPUT],
        "additionalProperties": False,
    }
    return function


def input_of(arguments: str) -> str:
    """Returns the text argument of a call of a `custom` tool. Of arguments that are cut, this is
    the text so far, and of malformed ones all text."""
    try:
        value = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        value = None
    text = arguments
    if isinstance(value, dict) and isinstance(value.get(_INPUT), str):
        text = value[_INPUT]
    elif (cut := _CUT_INPUT.fullmatch(arguments)) is not None:
        text = json.loads(f'"{cut[1]}"', strict=False)
    # Half of a surrogate pair is no character.
    return text.encode(errors="ignore").decode()


def arguments_of_input(text: str) -> str:
    """Returns the arguments of the call of a `custom` tool with this text."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


# The text so far of arguments that end in the middle of it. Half of an escape is left out.
_CUT_INPUT = re.compile(
    r'\s*\{\s*"input"\s*:\s*"((?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*)(?:\\(?:u[0-9a-fA-F]{0,3})?|"\s*)?'
)


def drop_tools(body: dict[str, Any], kept: Container[str]) -> list[str]:
    """Removes the tools whose type is not in `kept` from a body, because Tandem does not run tools.
    Returns what was removed: TYPE.NAME for a tool with a name, TYPE for a tool without a name."""
    tools = body.get("tools")
    if not isinstance(tools, list):
        return []
    kinds = [kind_of(tool) for tool in tools]
    is_dropped = [kind is not None and kind not in kept for kind in kinds]
    body["tools"] = [tool for tool, dropped in zip(tools, is_dropped, strict=True) if not dropped]
    return [
        f"{tool['type']}.{tool.get('name') or ''}".rstrip(".")
        for tool, dropped in zip(tools, is_dropped, strict=True)
        if dropped
    ]


def leave_out_media(result: dict[str, Any], field: str, text: str) -> list[str]:
    """Replaces the images and files in a tool's result by a text, because a chat has only texts
    there. `text` is the type of parts with text. Returns the types of these images and files."""
    parts = result.get(field)
    if not isinstance(parts, list):
        return []
    kinds = []
    shown = []
    for part in parts:
        kind = kind_of(part)
        if kind is None or kind not in _MEDIA or is_text(part):
            shown.append(part)
        else:
            kinds.append(kind)
    notes = filter(None, dict.fromkeys(_MEDIA[kind] for kind in kinds))
    result[field] = [*shown, *({"type": text, "text": note} for note in notes)]
    return kinds


def kind_of(part: object) -> str | None:
    """Returns the type of a tool, an item or a content part; None if it is not valid."""
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else None


def _check_tool(tool: object) -> object:
    """Validates the fields of a tool that Tandem uses. A function changes only where its schema has
    null, because the chat template gets it as the client sent it. A tool of the type `custom`
    becomes a function. The type may be left out, as with vLLM and Ollama."""
    if isinstance(tool, dict) and "type" not in tool and "function" in tool:
        tool = {"type": "function", **tool}
    if not isinstance(tool, dict) or tool.get("type") not in ("function", CUSTOM):
        raise _wrong('the type of a tool must be "function" or "custom"')
    kind = tool["type"]
    function = tool.get(kind)
    if not isinstance(function, dict):
        raise _wrong(f"the {kind} of a tool must be an object")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise _wrong(f"the {kind} of a tool must have a name")
    if not isinstance(function.get("description"), str | None):
        raise _wrong("the description of a tool must be a string")
    if kind == CUSTOM:
        sent = as_function(function["name"], function.get("description"), function.get("format"))
        return {"type": "function", "function": sent}
    parameters = function.get("parameters")
    if not isinstance(parameters, dict | None):
        raise _wrong("the parameters of a function must be an object with a JSON schema")
    if parameters is None:
        return tool
    # Chat templates read some keywords of the schema, and fail if one is null.
    return {**tool, kind: {**function, "parameters": without_nulls(parameters)}}


Tool = Annotated[dict[str, Any], BeforeValidator(_check_tool)]
TOOLS = TypeAdapter(list[Tool])


def custom_names(tools: object) -> frozenset[str]:
    """Returns the names of the valid tools of the type `custom` in a chat's tools."""
    return frozenset(
        tool[CUSTOM]["name"]
        for tool in (tools if isinstance(tools, list) else ())
        if kind_of(tool) == CUSTOM
    )


class ToolChoice(NamedTuple):
    choice: Literal["auto", "none", "required"] = "auto"
    # name of the function that must be called; "": any function. Set only if `choice` is
    # "required".
    function: str = ""
    # names of the functions that may be called; None: all
    allowed: frozenset[str] | None = None


def _read_choice(sent: object) -> ToolChoice:
    match sent:
        case "auto" | "none" | "required":
            return ToolChoice(sent)
        case {"type": "function", "function": {"name": str(name)}} if name:
            return ToolChoice("required", name)
        case {"type": "custom", "custom": {"name": str(name)}} if name:
            return ToolChoice("required", name)
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)},
        }:
            return ToolChoice(mode, allowed=frozenset(filter(None, map(_name_of, tools))))
    raise _wrong(
        'tool_choice must be "auto", "none", "required", or an object with the type "function" and '
        'the name of a function, or with the type "allowed_tools" and a list of tools'
    )


def _name_of(tool: object) -> str | None:
    """Returns the name of a tool in a list of allowed ones; None for a tool of another type."""
    match tool:
        case {"type": "function", "function": {"name": str(name)}} | {
            "type": "custom",
            "custom": {"name": str(name)},
        }:
            return name
    return None


SentToolChoice = Annotated[ToolChoice, PlainValidator(_read_choice)]


class _SentFunction(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    name: str
    # Some clients send the object itself.
    arguments: str | dict[str, Any] | None = None


class _SentCustom(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    name: str
    input: str = ""


class SentToolCall(BaseModel):
    """A tool call of an earlier answer, as the client puts it back into the conversation."""

    model_config = ConfigDict(strict=True, extra="ignore")

    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: _SentFunction | None = None
    custom: _SentCustom | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if (self.function is None) == (self.custom is None):
            raise _wrong("a tool call must have either function or custom")
        return self

    def to_tool_call(self) -> ToolCall:
        """Converts the call to a ToolCall. The arguments become an object, because chat templates
        expect one."""
        if self.custom is not None:
            return ToolCall(self.id or "", self.custom.name, {_INPUT: self.custom.input})
        assert self.function is not None
        sent = self.function.arguments or ""
        arguments = sent if isinstance(sent, dict) else arguments_of(sent)
        return ToolCall(self.id or "", self.function.name, arguments)


def arguments_of(text: str) -> dict[str, Any]:
    """Parses the arguments of a tool call. If a model wrote malformed JSON, the result is
    {"arguments": text}, so that the conversation can continue."""
    try:
        arguments = json.loads(without_halves(text), strict=False) if text.strip() else {}
    except (ValueError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {"arguments": text}


def call_body(call: CallDelta, custom: Container[str] = ()) -> dict[str, Any]:
    """Formats a tool call for a complete reply. `custom` has the names of the `custom` tools."""
    if call.name in custom:
        sent = {"name": call.name, "input": input_of(call.arguments)}
        return {"id": call.id, "type": CUSTOM, CUSTOM: sent}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


class CallChunks:
    """Formats the deltas of one answer's tool calls for a stream.

    The arguments of a function are spread over several deltas, of which only the first one has the
    id and the name. The text of a `custom` tool is a string in the model's JSON, so it comes in one
    piece when the call is complete.
    """

    def __init__(self, custom: Container[str]) -> None:
        self._custom = custom
        self._held: CallDelta | None = None  # the call of a `custom` tool that is not complete

    def push(self, calls: Sequence[CallDelta], *, is_last: bool) -> list[dict[str, Any]]:
        """Returns the chunks for new deltas. `is_last`: the answer ends with them."""
        chunks = []
        for call in calls:
            if call.name:
                chunks += self._flush()
            if call.name in self._custom:
                self._held = CallDelta(call.index, call.arguments, call.id, call.name)
            elif self._held is not None:
                self._held.arguments += call.arguments
            elif call.name:
                chunks.append({"index": call.index, **call_body(call)})
            else:
                chunks.append({"index": call.index, "function": {"arguments": call.arguments}})
        return [*chunks, *(self._flush() if is_last else ())]

    def _flush(self) -> list[dict[str, Any]]:
        held = self._held
        self._held = None
        return [] if held is None else [{"index": held.index, **call_body(held, self._custom)}]


def joined(deltas: list[CallDelta]) -> list[CallDelta]:
    """Joins the deltas of an answer's tool calls into complete tool calls, in order."""
    calls: list[CallDelta] = []
    for delta in deltas:
        if delta.index == len(calls):
            calls.append(CallDelta(delta.index, "", delta.id, delta.name))
        calls[delta.index].arguments += delta.arguments
    return calls

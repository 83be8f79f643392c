"""Tools, tool calls and reasoning in OpenAI's chats: in requests and in replies."""

import json
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainValidator, TypeAdapter
from pydantic_core import PydanticCustomError

from tandem.router.parsers.machine import CallDelta
from tandem.router.request.conversation import ToolCall


def _wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("unsupported", message)


def _check_tool(tool: object) -> object:
    """Validates the fields of a tool that Tandem uses. The tool itself does not change, because the
    chat template gets it as the client sent it."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise _wrong('the type of a tool must be "function"')
    function = tool.get("function")
    if not isinstance(function, dict):
        raise _wrong("the function of a tool must be an object")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise _wrong("the function of a tool must have a name")
    if not isinstance(function.get("description"), str | None):
        raise _wrong("the description of a function must be a string")
    if not isinstance(function.get("parameters"), dict | None):
        raise _wrong("the parameters of a function must be an object with a JSON schema")
    return tool


Tool = Annotated[dict[str, Any], BeforeValidator(_check_tool)]
TOOLS = TypeAdapter(list[Tool])


class ToolChoice(NamedTuple):
    choice: Literal["auto", "none", "required"] = "auto"
    # name of the function that must be called; "": any function. Set only if `choice` is
    # "required".
    function: str = ""


def _read_choice(sent: object) -> ToolChoice:
    match sent:
        case "auto" | "none" | "required":
            return ToolChoice(sent)
        case {"type": "function", "function": {"name": str(name)}} if name:
            return ToolChoice("required", name)
    raise _wrong(
        'tool_choice must be "auto", "none", "required", or an object with the type "function" and '
        "the name of a function"
    )


SentToolChoice = Annotated[ToolChoice, PlainValidator(_read_choice)]


class _SentFunction(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    name: str
    arguments: str = ""


class SentToolCall(BaseModel):
    """A tool call of an earlier answer, as the client puts it back into the conversation."""

    model_config = ConfigDict(strict=True, extra="ignore")

    id: str = ""
    type: Literal["function"] = "function"
    function: _SentFunction

    def to_tool_call(self) -> ToolCall:
        """Converts the call to a ToolCall. The arguments become an object, because chat templates
        expect one."""
        return ToolCall(self.id, self.function.name, arguments_of(self.function.arguments))


def arguments_of(text: str) -> dict[str, Any]:
    """Parses the arguments of a tool call. If a model wrote malformed JSON, the result is
    {"arguments": text}, so that the conversation can continue."""
    try:
        arguments = json.loads(text, strict=False) if text.strip() else {}
    except (ValueError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {"arguments": text}


def call_body(call: CallDelta) -> dict[str, Any]:
    """Formats a tool call for a complete reply."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def call_chunk(call: CallDelta) -> dict[str, Any]:
    """Formats a delta of a tool call for a stream. The arguments of a call are spread over several
    deltas. Only the first delta of a call has the id and the name."""
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **call_body(call)}


def joined(deltas: list[CallDelta]) -> list[CallDelta]:
    """Joins the deltas of an answer's tool calls into complete tool calls, in order."""
    calls: list[CallDelta] = []
    for delta in deltas:
        if delta.index == len(calls):
            calls.append(CallDelta(delta.index, "", delta.id, delta.name))
        calls[delta.index].arguments += delta.arguments
    return calls

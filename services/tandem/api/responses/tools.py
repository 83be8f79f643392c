"""The tools of a request to the Responses API, and the functions of a chat that they become.

  tool        function of the chat
  function    the same
  custom      a function with one argument, the text; its calls return as `custom_tool_call`
  namespace   each of its tools; a call returns the name of the namespace beside that of the tool

A chat has one name for each function. If a tool of a namespace has the same name as an earlier
tool, the name of the namespace is put before it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from tandem.api.openai.tools import CUSTOM, as_function, drop_tools, kind_of
from tandem.common.printable import shorten
from tandem.errors import BadRequest

TOOLS_ALLOWED = (
    'a list of tools such as {"type": "function", "name": ..., "parameters": {...}}, with the type '
    "function, custom or namespace"
)
CHOICE_ALLOWED = (
    '"auto", "none", "required", one of the tools, such as {"type": "function", "name": ...}, or '
    'several, such as {"type": "allowed_tools", "mode": "auto", "tools": [...]}'
)
_KINDS = ("function", CUSTOM, "namespace")


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class ToolName(NamedTuple):
    """A tool as a client names it. `namespace` is None for a tool outside of a namespace."""

    name: str
    namespace: str | None = None


class FunctionTool(_Part):
    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def function(self) -> dict[str, Any]:
        """Returns the function of a chat. Fields that the client did not send are left out."""
        return self.model_dump(exclude_none=True, exclude={"type"})


class CustomTool(_Part):
    type: Literal["custom"]
    name: str = Field(min_length=1)
    description: str | None = None
    format: dict[str, Any] | None = None

    def function(self) -> dict[str, Any]:
        return as_function(self.name, self.description, self.format)


def _check_kind(tool: object, kinds: Sequence[str] = _KINDS) -> object:
    if (kind := kind_of(tool)) is not None and kind not in kinds:
        raise PydanticCustomError(
            "unsupported",
            "the tool has the type {kind}; allowed are {allowed}",
            {"kind": repr(kind[:40]), "allowed": ", ".join(kinds)},
        )
    return tool


class Namespace(_Part):
    type: Literal["namespace"]
    name: str = Field(min_length=1)
    description: str = ""
    tools: list[
        Annotated[
            Annotated[FunctionTool | CustomTool, Field(discriminator="type")],
            BeforeValidator(lambda tool: _check_kind(tool, _KINDS[:2])),
        ]
    ] = []


ResponseTool = Annotated[
    Annotated[FunctionTool | CustomTool | Namespace, Field(discriminator="type")],
    BeforeValidator(_check_kind),
]


class ToolChoice(_Part):
    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None

    def to_chat(self, tools: "ChatTools") -> dict[str, Any]:
        return {"type": "function", "function": {"name": tools.name_of(self)}}


class AllowedTools(_Part):
    """The tools that the answer may call. Those that OpenAI's servers run have no effect."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[ToolChoice],
        BeforeValidator(
            lambda sent: (
                [tool for tool in sent if kind_of(tool) in (None, *_KINDS)]
                if isinstance(sent, list)
                else sent
            )
        ),
    ]

    def to_chat(self, tools: "ChatTools") -> dict[str, Any]:
        allowed = {"mode": self.mode, "tools": [tool.to_chat(tools) for tool in self.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}


@dataclass(frozen=True, slots=True)
class ChatTools:
    """The functions of a chat, and the tools that they were."""

    functions: tuple[dict[str, Any], ...]
    names: Mapping[ToolName, str]  # tool -> name of its function
    sent: Mapping[str, ToolName]  # the inverse
    custom: frozenset[str]  # names of the functions that were tools of the type `custom`

    def name_of(self, choice: ToolChoice) -> str:
        """Returns the name of the function that the client chose; its own name if there is none."""
        return self.names.get(ToolName(choice.name, choice.namespace), choice.name)


def chat_tools(tools: Sequence[FunctionTool | CustomTool | Namespace]) -> ChatTools:
    """Converts tools to functions of a chat. Tools outside of namespaces come first. Raises
    BadRequest if two functions would have the same name."""
    functions = []
    names: dict[ToolName, str] = {}
    sent: dict[str, ToolName] = {}
    custom = set()
    for tool, namespace in sorted(_named(tools), key=lambda pair: pair[1] is not None):
        own = ToolName(tool.name, namespace)
        name = tool.name
        if name in sent and namespace is not None:
            name = f"{namespace}__{name}"
        if name in sent or own in names:
            raise BadRequest(
                f"tools has two functions with the name {shorten(name)}; rename one", param="tools"
            )
        names[own] = name
        sent[name] = own
        functions.append({**tool.function(), "name": name})
        if tool.type == CUSTOM:
            custom.add(name)
    return ChatTools(tuple(functions), names, sent, frozenset(custom))


def _named(
    tools: Sequence[FunctionTool | CustomTool | Namespace],
) -> Iterator[tuple[FunctionTool | CustomTool, str | None]]:
    for tool in tools:
        if isinstance(tool, Namespace):
            yield from ((inner, tool.name) for inner in tool.tools)
        else:
            yield tool, None


def take_additional_tools(body: dict[str, Any]) -> None:
    """Moves the tools in items of the type `additional_tools` to the tools of the body, because
    chat templates write all tools before the messages. Codex sends its tools in such an item."""
    items, tools = body.get("input"), body.get("tools") or []
    if not (isinstance(items, list) and isinstance(tools, list)):
        return
    added = [item for item in items if kind_of(item) == "additional_tools"]
    if not added:
        return
    for item in added:
        if isinstance(item.get("tools"), list):
            tools = [*tools, *(tool for tool in item["tools"] if tool not in tools)]
    body["tools"] = tools
    body["input"] = [item for item in items if kind_of(item) != "additional_tools"]


def leave_out_tools(body: dict[str, Any]) -> list[str]:
    """Removes the tools that OpenAI's servers run from a body, because Tandem does not run tools.
    Returns what was removed, such as `web_search`. Raises BadRequest if `tool_choice` requires a
    removed tool."""
    dropped = drop_tools(body, _KINDS)
    tools = body.get("tools")
    tools = tools if isinstance(tools, list) else []
    for tool in tools:
        if kind_of(tool) == "namespace":
            dropped += [f"{tool.get('name')}.{name}" for name in drop_tools(tool, _KINDS[:2])]
    choice = body.get("tool_choice")
    needs = kind_of(choice) not in (None, "allowed_tools", *_KINDS)
    needs = needs or (choice == "required" and not tools)
    if dropped and needs:
        about = f"it is {shorten(choice)}, which needs a tool of an unsupported type"
        raise BadRequest(f"tool_choice must be {CHOICE_ALLOWED}; {about}", param="tool_choice")
    return dropped

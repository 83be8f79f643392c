"""Request bodies of OpenAI's Responses API (Open Responses), and their conversion to bodies of
OpenAI's chat API, which `openai.requests` parses.

https://www.openresponses.org/specification
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from tandem.api.openai.fields import UnusedFields
from tandem.api.openai.parsed import ParsedRequest
from tandem.api.openai.requests import parse_chat
from tandem.api.openai.structured import StreamOptions, Strict
from tandem.api.responses.items import ContentPart, Items, to_messages
from tandem.common.printable import shorten
from tandem.common.retention import PRIORITY_DEFAULT
from tandem.common.sampling_params import LOGPROBS_MAX
from tandem.errors import BadRequest
from tandem.router.request.allowed import ALLOWED

# Names of fields in OpenAI's chat API -> names of the corresponding fields in this API. Error
# messages use the names of this API.
NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning",
    "response_format": "text",
    "truncate_prompt_tokens": "truncation",
}
_LOGPROBS = "message.output_text.logprobs"
_SAMPLING = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "parallel_tool_calls")
_CACHE = ("prompt_cache_key", "prompt_cache_retention", "kv_priority")
# request fields that are copied unchanged into the response
_TOLD = (
    *("instructions", "previous_response_id", "max_output_tokens", "max_tool_calls"),
    *("top_logprobs", "truncation", "metadata", "safety_identifier", "prompt_cache_key", "user"),
)
_UNUSED = UnusedFields(
    ignored=frozenset(("prompt_cache_options",)),
    neutral={
        "background": (False,),
        "context_management": ([],),
        **dict.fromkeys(("conversation", "prompt", "moderation", "access_programs", "image"), ()),
    },
)
_ALLOWED = {
    "input": "a string or a non-empty list of items: messages, function_call, "
    "function_call_output and reasoning",
    "instructions": "a string",
    "previous_response_id": "the id of a response that this router keeps",
    "tools": 'a list of functions such as {"type": "function", "name": ..., "parameters": {...}}',
    "tool_choice": '"auto", "none", "required", or {"type": "function", "name": ...}',
    "text": 'an object with a format, such as {"type": "json_schema", "name": "answer", '
    '"schema": {...}}',
    "reasoning": 'an object such as {"effort": "low"}',
    "truncation": '"auto" or "disabled"',
    "include": f'a list of "{_LOGPROBS}" and "reasoning.encrypted_content"',
    "top_logprobs": f"an integer from 0 to {LOGPROBS_MAX}",
    "max_output_tokens": ALLOWED["max_completion_tokens"],
    "max_tool_calls": "an integer of at least 1",
    "metadata": "an object with strings",
    "store": "true or false",
    **dict.fromkeys(("user", "safety_identifier", "service_tier"), "a string"),
}


def _check_tool(tool: object) -> object:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != "function":
        message = "the tool has the type {kind}; only functions are supported"
        raise PydanticCustomError("unsupported", message, {"kind": repr(kind[:40])})
    return tool


def drop_tools(body: dict[str, Any]) -> list[str]:
    """Removes the tools that are not functions from a body, because Tandem does not run tools.
    Returns what was removed: TYPE.NAME for a tool with a name, TYPE for a tool without a name.

    A tool of the type `namespace` contains functions, which are removed with it. A client expects a
    call of such a function to have the name of the namespace, which Tandem's answers do not have.

    Raises BadRequest if `tool_choice` requires a removed tool.
    """
    tools = body.get("tools")
    if not isinstance(tools, list):
        return []
    dropped = [tool for tool in tools if _kind(tool) not in ("function", None)]
    if not dropped:
        return []
    body["tools"] = [tool for tool in tools if _kind(tool) in ("function", None)]
    choice = body.get("tool_choice")
    is_kept = any(_is_chosen(tool, choice) for tool in body["tools"] if _kind(tool))
    is_named = not is_kept and any(_is_chosen(tool, choice) for tool in dropped)
    if is_named or (choice == "required" and not body["tools"]):
        about = f"it is {shorten(choice)}, which needs a tool of an unsupported type"
        allowed = _ALLOWED["tool_choice"]
        raise BadRequest(f"tool_choice must be {allowed}; {about}", param="tool_choice")
    named = (f"{_kind(tool)}.{tool.get('name') or ''}".rstrip(".") for tool in dropped)
    return list(dict.fromkeys(named))


def _kind(tool: object) -> str | None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return kind if isinstance(kind, str) else None


def _is_chosen(tool: dict[str, Any], choice: object) -> bool:
    """Returns True if the client's `tool_choice` names this tool, or a function inside this
    tool."""
    if not isinstance(choice, dict):
        return False
    name = choice.get("name")
    if choice.get("type") == tool["type"] and name is None:
        return True
    inside = tool.get("tools")
    within = inside if isinstance(inside, list) else []
    return choice.get("type") in ("function", tool["type"]) and name in [
        each.get("name") for each in (tool, *within) if isinstance(each, dict)
    ]


class FunctionTool(ContentPart):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_chat(self) -> dict[str, Any]:
        """Converts the tool to a tool of OpenAI's chat API. Fields that the client did not send are
        left out."""
        return {
            "type": "function",
            "function": self.model_dump(exclude_none=True, exclude={"type"}),
        }


class FunctionChoice(ContentPart):
    type: Literal["function"]
    name: str


class TextFormat(ContentPart):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    def to_chat(self) -> dict[str, Any]:
        """Converts the format to the `response_format` of OpenAI's chat API."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": self.told(exclude={"type"})}

    def told(self, **more: Any) -> dict[str, Any]:
        """Returns the fields of the format that the client sent."""
        return self.model_dump(by_alias=True, exclude_none=True, **more)


class TextOptions(ContentPart):
    format: TextFormat = TextFormat(type="text", schema=None)
    # has no effect, because chat templates have no option for it
    verbosity: Literal["medium"] | None = None


class Reasoning(ContentPart):
    """`summary` has no effect: the reasoning itself is in the answer."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesBody(Strict):
    unused = _UNUSED
    allowed = _ALLOWED
    parts = {"stream_options": StreamOptions}

    model: str = Field("", description=ALLOWED["model"])
    input: Items = Field([], description=_ALLOWED["input"])
    instructions: str | None = None
    previous_response_id: str | None = Field(None, description=_ALLOWED["previous_response_id"])
    tools: list[Annotated[FunctionTool, BeforeValidator(_check_tool)]] = Field(
        [], description=_ALLOWED["tools"]
    )
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice = Field(
        "auto", description=_ALLOWED["tool_choice"]
    )
    parallel_tool_calls: bool = True
    text: TextOptions = Field(TextOptions(), description=_ALLOWED["text"])
    reasoning: Reasoning | None = Field(None, description=_ALLOWED["reasoning"])
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(
        [], description=_ALLOWED["include"]
    )
    max_output_tokens: int | None = Field(None, description=_ALLOWED["max_output_tokens"])
    max_tool_calls: int | None = Field(None, ge=1, description=_ALLOWED["max_tool_calls"])
    temperature: float = Field(1.0, description=ALLOWED["temperature"])
    top_p: float = Field(1.0, description=ALLOWED["top_p"])
    top_k: int = Field(0, description=ALLOWED["top_k"])
    seed: int | None = Field(None, description=ALLOWED["seed"])
    presence_penalty: float = Field(0.0, description=ALLOWED["presence_penalty"])
    frequency_penalty: float = Field(0.0, description=ALLOWED["frequency_penalty"])
    top_logprobs: int = Field(0, ge=0, le=LOGPROBS_MAX, description=_ALLOWED["top_logprobs"])
    truncation: Literal["auto", "disabled"] = Field("disabled", description=_ALLOWED["truncation"])
    stream: bool = Field(False, description=ALLOWED["stream"])
    stream_options: StreamOptions | None = None
    store: bool | None = Field(None, description=_ALLOWED["store"])
    metadata: dict[str, str] = {}
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = Field(None, description=ALLOWED["prompt_cache_key"])
    prompt_cache_retention: str | None = Field(None, description=ALLOWED["prompt_cache_retention"])
    kv_priority: int = Field(PRIORITY_DEFAULT, description=ALLOWED["kv_priority"])
    user: str | None = None

    def to_chat(self, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Converts the body to a body of OpenAI's chat API. `messages` are the chat messages of the
        whole conversation without `instructions`."""
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        chat: dict[str, Any] = {
            **{
                name: getattr(self, name)
                for name in (*_SAMPLING, *_CACHE, "model", "stream", "top_k", "seed")
                if name in self.model_fields_set
            },
            "messages": [*system, *messages],
            "max_tokens": self.max_output_tokens,
            "response_format": self.text.format.to_chat(),
            "tools": [tool.to_chat() for tool in self.tools],
            "tool_choice": self._tool_choice(),
        }
        if self.wants_logprobs:
            chat |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.reasoning is not None and self.reasoning.effort is not None:
            effort = self.reasoning.effort
            chat["reasoning_effort"] = "xhigh" if effort == "max" else effort
        if self.truncation == "auto":
            # -1 keeps the last tokens of the prompt, as many as fit into the context
            chat["truncate_prompt_tokens"] = -1
        return chat

    def _tool_choice(self) -> str | dict[str, Any]:
        choice = self.tool_choice
        if isinstance(choice, FunctionChoice):
            return {"type": "function", "function": {"name": choice.name}}
        return choice

    @property
    def wants_logprobs(self) -> bool:
        return _LOGPROBS in self.include or self.top_logprobs > 0

    def told(self) -> dict[str, Any]:
        """Returns the request's options in the form in which the response repeats them."""
        choice = self.tool_choice
        effort = self.reasoning.effort if self.reasoning is not None else None
        return {
            **{name: getattr(self, name) for name in (*_SAMPLING, *_TOLD)},
            "tools": [tool.model_dump() for tool in self.tools],
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "text": {"format": self.text.format.told()},
            "reasoning": {"effort": effort, "summary": None},
            "background": False,
            "service_tier": "default",
        }


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """A body of this API, and the chat request into which it was converted."""

    body: ResponsesBody
    chat: ParsedRequest
    messages: tuple[dict[str, Any], ...]  # messages of the chat request, without `instructions`


def parse_response(
    body: ResponsesBody, earlier: Sequence[dict[str, Any]], request_id: str
) -> ParsedResponse:
    """Converts a body to a chat request. The conversation begins with the messages `earlier`.
    Raises BadRequest. Some of these errors name fields of OpenAI's chat API; `NAMES` has the names
    that the fields have in this API."""
    messages = (*earlier, *to_messages(body.input))
    if not messages:
        raise BadRequest(f"input must be {_ALLOWED['input']}", param="input")
    return ParsedResponse(body, parse_chat(body.to_chat(messages), request_id), messages)

"""Request bodies of OpenAI's Responses API (Open Responses), and their conversion to bodies of
OpenAI's chat API, which `openai.requests` parses.

https://www.openresponses.org/specification
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from tandem.api.openai.fields import FieldPolicy, each
from tandem.api.openai.parsed import ParsedRequest
from tandem.api.openai.requests import NvExt, parse_chat
from tandem.api.openai.structured import StreamOptions, Strict, StructuredOutputs
from tandem.api.responses.items import ContentPart, Items, leave_out_items, to_messages
from tandem.api.responses.tools import (
    CHOICE_ALLOWED,
    TOOLS_ALLOWED,
    AllowedTools,
    ChatTools,
    FunctionTool,
    ResponseTool,
    ToolChoice,
    chat_tools,
    leave_out_tools,
    take_additional_tools,
)
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
# Members of `include` for what an answer has in any case, or if they are sent.
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")
_SAMPLING = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "parallel_tool_calls")
_CACHE = ("prompt_cache_key", "prompt_cache_retention", "kv_priority", "priority")
# request fields that are copied unchanged into the response
_TOLD = (
    *("instructions", "previous_response_id", "max_output_tokens", "max_tool_calls"),
    *("top_logprobs", "truncation", "metadata", "safety_identifier", "prompt_cache_key", "user"),
)
# The same, for the header `warning`.
HINT_NAMES = {"reasoning_effort": "reasoning.effort"}
_POLICY = FieldPolicy(
    records=frozenset(("prompt_cache_options",)),
    # Without compaction (`context_management`) a conversation only gets longer.
    hints=each("context_management", "moderation", "access_programs", "image"),
    refused=each("background", "conversation", "prompt"),
)
_ALLOWED = {
    "input": "a string or a non-empty list of items: messages, function_call, "
    "function_call_output, reasoning and item_reference",
    "instructions": "a string",
    "previous_response_id": "the id of a response that this router keeps",
    "tools": TOOLS_ALLOWED,
    "tool_choice": CHOICE_ALLOWED,
    "text": 'an object with a format, such as {"type": "json_schema", "name": "answer", '
    '"schema": {...}}',
    "reasoning": 'an object such as {"effort": "low"}',
    "truncation": '"auto" or "disabled"',
    "include": f'a list of strings, such as "{_LOGPROBS}"',
    "top_logprobs": f"an integer from 0 to {LOGPROBS_MAX}",
    "max_output_tokens": ALLOWED["max_completion_tokens"],
    "max_tool_calls": "an integer of at least 1",
    "metadata": "an object with strings",
    "store": "true or false",
    **dict.fromkeys(("user", "safety_identifier", "service_tier"), "a string"),
}


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


class TextOptions(Strict):
    model_config = ConfigDict(strict=True, extra="ignore")
    field_policy = FieldPolicy(hints=each("verbosity"))

    format: TextFormat = TextFormat(type="text", schema=None)


class Reasoning(Strict):
    """`summary` has no effect: the reasoning itself is in the answer."""

    model_config = ConfigDict(strict=True, extra="ignore")
    field_policy = FieldPolicy(
        records=frozenset(("summary", "generate_summary")), hints=each("context")
    )

    effort: str | None = None


class ResponsesBody(Strict):
    field_policy = _POLICY
    allowed = _ALLOWED
    parts = {
        "stream_options": StreamOptions,
        "nvext": NvExt,
        "text": TextOptions,
        "reasoning": Reasoning,
        "structured_outputs": StructuredOutputs,
    }

    model: str = Field("", description=ALLOWED["model"])
    input: Items = Field([], description=_ALLOWED["input"])
    instructions: str | None = None
    previous_response_id: str | None = Field(None, description=_ALLOWED["previous_response_id"])
    tools: list[ResponseTool] = Field([], description=_ALLOWED["tools"])
    tool_choice: (
        Literal["auto", "none", "required"]
        | Annotated[ToolChoice | AllowedTools, Field(discriminator="type")]
    ) = Field("auto", description=_ALLOWED["tool_choice"])
    parallel_tool_calls: bool = True
    text: TextOptions = Field(TextOptions(), description=_ALLOWED["text"])
    # an addition of vLLM
    structured_outputs: StructuredOutputs | None = Field(
        None, description=ALLOWED["structured_outputs"]
    )
    reasoning: Reasoning | None = Field(None, description=_ALLOWED["reasoning"])
    include: list[str] = Field([], description=_ALLOWED["include"])
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
    priority: int | None = Field(None, description=ALLOWED["priority"])
    nvext: NvExt | None = Field(None, description=ALLOWED["nvext"])
    user: str | None = None

    @classmethod
    def leave_out(cls, body: dict[str, Any]) -> list[str]:
        """Removes tools that OpenAI's servers run, and what they did in earlier responses. Raises
        BadRequest if `tool_choice` requires a removed tool."""
        take_additional_tools(body)
        dropped = [f"tools.{name}" for name in leave_out_tools(body)]
        dropped += [f"input.{kind}" for kind in leave_out_items(body)]
        include = body.get("include")
        if isinstance(include, list):
            others = [one for one in include if isinstance(one, str) and one not in _INCLUDED]
            dropped += [f"include.{one}" for one in others]
        return dropped

    def to_chat(self, messages: Sequence[dict[str, Any]], tools: ChatTools) -> dict[str, Any]:
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
            "tools": [{"type": "function", "function": one} for one in tools.functions],
            "tool_choice": self._tool_choice(tools),
        }
        if self.nvext is not None:
            chat["nvext"] = self.nvext.model_dump(exclude_none=True)
        if self.wants_logprobs:
            chat |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.structured_outputs is not None:
            chat["structured_outputs"] = self.structured_outputs.told()
        if self.reasoning is not None:
            chat["reasoning_effort"] = self.reasoning.effort
        if self.truncation == "auto":
            # -1 keeps the last tokens of the prompt, as many as fit into the context
            chat["truncate_prompt_tokens"] = -1
        return chat

    def _tool_choice(self, tools: ChatTools) -> str | dict[str, Any]:
        choice = self.tool_choice
        if isinstance(choice, ToolChoice | AllowedTools):
            return choice.to_chat(tools)
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
            "tools": [
                tool.model_dump(exclude_none=not isinstance(tool, FunctionTool))
                for tool in self.tools
            ],
            "tool_choice": (
                choice if isinstance(choice, str) else choice.model_dump(exclude_none=True)
            ),
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
    tools: ChatTools


def parse_response(
    body: ResponsesBody, earlier: Sequence[dict[str, Any]], request_id: str
) -> ParsedResponse:
    """Converts a body to a chat request. The conversation begins with the messages `earlier`.
    Raises BadRequest. Some of these errors name fields of OpenAI's chat API; `NAMES` has the names
    that the fields have in this API."""
    tools = chat_tools(body.tools)
    messages = (*earlier, *to_messages(body.input, tools.names))
    if not messages:
        raise BadRequest(f"input must be {_ALLOWED['input']}", param="input")
    chat = parse_chat(body.to_chat(messages, tools), request_id)
    return ParsedResponse(body, chat, messages, tools)

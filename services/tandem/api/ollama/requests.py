"""Request bodies of Ollama's API, and their conversion to bodies of OpenAI's API.

Ollama keeps most sampling parameters in the object `options`. Those without effect here, such as
`num_gpu`, are named in the header `warning`. Streaming is the default.
https://docs.ollama.com/api
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tandem.api.openai.embeddings import INPUTS_MAX
from tandem.api.openai.fields import FieldPolicy, each
from tandem.api.openai.parsed import ParsedRequest
from tandem.api.openai.requests import parse_chat, parse_completion, validate
from tandem.api.openai.structured import Strict
from tandem.router.request.allowed import ALLOWED
from tandem.router.request.conversation import Conversation

# Field of a body of OpenAI's API -> field of Ollama's, for error messages.
NAMES = {
    "max_tokens": "num_predict",
    "repetition_penalty": "repeat_penalty",
    "response_format": "format",
    "reasoning_effort": "think",
}
HINT_NAMES = {"thinking": "think", "reasoning_effort": "think"}
TAG = ":latest"  # the default tag of a model's name
_ALLOWED = {
    "model": "the name of the served model",
    "messages": 'a list of messages such as {"role": "user", "content": "..."}, which may have '
    "images (base64), tool_calls and tool_name",
    "prompt": "a string",
    "system": "a string",
    "images": "a list of images in base64",
    "format": '"json" or a JSON schema',
    "options": 'an object such as {"temperature": 0, "num_predict": 100}',
    "think": "true, false, or an effort such as high",
    "raw": "true or false",
    "truncate": "true or false",
    "input": f"a string, or a list of at most {INPUTS_MAX} strings",
    "keep_alive": "a duration",
    **{name: ALLOWED[name] for name in ("temperature", "top_p", "top_k", "min_p", "seed")},
    **{name: ALLOWED[name] for name in ("presence_penalty", "frequency_penalty", "stop")},
    "num_predict": "an integer; below 1: no limit",
    "repeat_penalty": ALLOWED["repetition_penalty"],
}
# Options that concern how Ollama loads or samples, and have no effect here.
_OPTION_HINTS = each(
    *("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram"),
    *("f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only"),
    *("repeat_last_n", "penalize_newline", "typical_p", "tfs_z", "mirostat", "mirostat_eta"),
    *("mirostat_tau", "draft_num_predict"),
)


class Options(Strict):
    field_policy = FieldPolicy(hints=_OPTION_HINTS)
    allowed = _ALLOWED

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    num_predict: int | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None

    def to_openai(self) -> dict[str, Any]:
        """Converts the options to fields of OpenAI's API."""
        fields = self.model_dump(exclude_none=True)
        num = fields.pop("num_predict", 0)
        renamed = {ours: fields.pop(own) for ours, own in NAMES.items() if own in fields}
        return {**fields, **renamed, **({"max_tokens": num} if num > 0 else {})}


class _Body(Strict):
    # `keep_alive` is about Ollama's memory: the model of a cluster stays loaded.
    field_policy = FieldPolicy(
        records=frozenset(("keep_alive", "shift")),
        refused=each("template", "context", "suffix", "width", "height", "steps"),
    )
    allowed = _ALLOWED
    parts = {"options": Options}

    model: str = Field(description=_ALLOWED["model"])
    options: dict[str, Any] = Field({}, description=_ALLOWED["options"])


class _GenerationBody(_Body):
    stream: bool = Field(True, description=ALLOWED["stream"])
    format: Literal["", "json"] | dict[str, Any] = Field("", description=_ALLOWED["format"])
    think: bool | str | None = Field(None, description=_ALLOWED["think"])
    logprobs: bool = Field(False, description="true or false")
    top_logprobs: int = Field(0, description="an integer from 0 on, and only with logprobs=true")

    def common(self) -> dict[str, Any]:
        """Returns the fields of OpenAI's API that chats and completions share."""
        body: dict[str, Any] = {"model": self.model, "stream": self.stream}
        body |= validate(Options, self.options).to_openai()
        if self.format == "json":
            body["response_format"] = {"type": "json_object"}
        elif self.format:
            schema = {"name": "format", "schema": self.format}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return body

    def chat(self, messages: list[dict[str, Any]], request_id: str, **more: Any) -> ParsedRequest:
        """Parses the body as a chat with these messages of OpenAI's API."""
        body = {**self.common(), "messages": messages, **more}
        if self.logprobs:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if isinstance(self.think, str):
            body["reasoning_effort"] = self.think
        parsed = parse_chat(body, request_id)
        (request,) = parsed.requests
        assert isinstance(request.prompt, Conversation)
        thinking = None if self.think is None else bool(self.think)
        chat = replace(request.prompt, thinking=thinking)
        return replace(parsed, requests=(replace(request, prompt=chat),))


class CallFunction(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    name: str
    arguments: dict[str, Any] = {}


class Call(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    function: CallFunction
    id: str | None = None


class ChatMessage(BaseModel):
    """A message ignores keys that are not named here."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatBody(_GenerationBody):
    messages: list[ChatMessage] = Field([], description=_ALLOWED["messages"])
    tools: list[dict[str, Any]] = Field([], description=ALLOWED["tools"])

    @property
    def is_empty(self) -> bool:
        """True if the client asks for no answer."""
        return not self.messages

    def parse(self, request_id: str) -> ParsedRequest:
        """Converts the body to a chat. Raises BadRequest."""
        return self.chat(_messages(self.messages), request_id, tools=self.tools)


class OllamaGenerateBody(_GenerationBody):
    prompt: str = Field("", description=_ALLOWED["prompt"])
    system: str = Field("", description=_ALLOWED["system"])
    images: list[str] = Field([], description=_ALLOWED["images"])
    raw: bool = Field(False, description=_ALLOWED["raw"])

    @property
    def is_empty(self) -> bool:
        """True if the client asks for no answer."""
        return not (self.prompt or self.images or self.system)

    def parse(self, request_id: str) -> ParsedRequest:
        """Converts the body to a chat with one message, or to a completion if `raw` is true. Raises
        BadRequest."""
        if self.raw:
            body = self.common()
            if self.logprobs:
                body["logprobs"] = self.top_logprobs
            parsed = parse_completion({**body, "prompt": self.prompt}, request_id)
            (request,) = parsed.requests
            # A completion of OpenAI's API has 16 tokens by default, one of Ollama has no limit.
            return replace(parsed, requests=(replace(request, default_max_tokens=None),))
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": self.system})
        messages.append({"role": "user", "content": _content(self.prompt, self.images)})
        return self.chat(messages, request_id)


class OllamaEmbedBody(_Body):
    input: str | list[str] = Field(description=_ALLOWED["input"])
    truncate: bool = Field(True, description=_ALLOWED["truncate"])
    dimensions: int | None = Field(None, description="the model's own number of dimensions")

    def to_openai(self) -> dict[str, Any]:
        """Converts the body to one of OpenAI's embeddings."""
        body: dict[str, Any] = {"model": self.model, "input": self.input}
        if self.dimensions is not None:
            body["dimensions"] = self.dimensions
        return {**body, "truncate_prompt_tokens": -1} if self.truncate else body


class OllamaEmbeddingsBody(_Body):
    """The older form of `OllamaEmbedBody`."""

    prompt: str = Field(description=_ALLOWED["prompt"])

    def to_openai(self) -> dict[str, Any]:
        return {"model": self.model, "input": self.prompt, "truncate_prompt_tokens": -1}


class OllamaShowBody(Strict):
    field_policy = FieldPolicy(records=frozenset(("verbose", "options", "system", "template")))
    allowed = {"name": _ALLOWED["model"], "model": _ALLOWED["model"]}

    model: str = Field("", description=_ALLOWED["model"])
    name: str = Field("", description="the older name of the field model")


def _content(text: str, images: Sequence[str]) -> str | list[dict[str, Any]]:
    """Returns the content of a message of OpenAI's API. Ollama's images are plain base64."""
    if not images:
        return text
    urls = [image if image.startswith("data:") else f"data:;base64,{image}" for image in images]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*parts, {"type": "text", "text": text}]


def _messages(sent: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Converts messages to those of OpenAI's API, in which each call has an id. The result of a
    tool belongs to the first open call with the name of the tool, or else to the first open one."""
    messages: list[dict[str, Any]] = []
    open_calls: dict[str, str] = {}  # id of a call without a result -> name of its tool
    for index, one in enumerate(sent):
        message: dict[str, Any] = {"role": one.role}
        message["content"] = _content(one.content or "", one.images or ())
        if one.thinking:
            message["reasoning_content"] = one.thinking
        if one.tool_calls:
            calls = {
                call.id or f"call_{index}_{at}": call.function
                for at, call in enumerate(one.tool_calls)
            }
            open_calls |= {call_id: function.name for call_id, function in calls.items()}
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": function.model_dump()}
                for call_id, function in calls.items()
            ]
        if one.role == "tool":
            named = (call_id for call_id, name in open_calls.items() if name == one.tool_name)
            found = one.tool_call_id or next(named, next(iter(open_calls), ""))
            open_calls.pop(found, None)
            message["tool_call_id"] = found
            if one.tool_name:
                message["name"] = one.tool_name
        messages.append(message)
    return messages

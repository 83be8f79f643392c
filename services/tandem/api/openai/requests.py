"""Request bodies of OpenAI's completions and chat completions, and their conversion to
ClientRequests.

The pydantic classes of this module check only the types of values. `SamplingParams` and
`ClientRequest` check whether a number is in its range, for all APIs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from tandem.api.openai.fields import COMPLETION_POLICY
from tandem.api.openai.files import text_of_file
from tandem.api.openai.parsed import ParsedRequest
from tandem.api.openai.structured import (
    StreamOptions,
    Strict,
    StructuredFields,
    StructuredOutputs,
)
from tandem.api.openai.tools import (
    CUSTOM,
    SentToolCall,
    SentToolChoice,
    Tool,
    ToolChoice,
    custom_names,
    drop_tools,
    kind_of,
    leave_out_media,
)
from tandem.common.kv_budget import SINKS_DEFAULT, SINKS_WINDOW, KvBudget
from tandem.common.retention import PRIORITY_DEFAULT, Retention
from tandem.common.sampling_params import CHOICES_MAX, LOGPROBS_MAX, SamplingParams
from tandem.errors import BadRequest
from tandem.models.grammars.text import StructuredOutput
from tandem.router.request.allowed import ALLOWED, name_prompt, refusal
from tandem.router.request.conversation import Conversation, Message, SentImage
from tandem.router.request.request import MODEL_DEFAULTS, ClientRequest, Prompt
from tandem.router.request.retention import asked_retention
from tandem.router.request.urgency import priority_of

# Default of `max_tokens` for completions, as in OpenAI's API and vLLM. Without `max_tokens`, a chat
# may fill the model's context.
COMPLETION_MAX_TOKENS = 16
# fields of a body that SamplingParams has, too, but with another type or meaning
_OTHERS = {"logprobs", "structured_outputs"}
_SAMPLING = {*SamplingParams.__struct_fields__} - _OTHERS
_ROLE_ALIASES = {"developer": "system"}
_ALTERNATIVES = ("str", "list[int]", "list[str]")
_ALLOWED = {
    **ALLOWED,
    "prompt": f"{ALLOWED['prompt']}, or a list of at most {CHOICES_MAX} such prompts",
    "logprobs": f"an integer from 0 to {LOGPROBS_MAX} for a completion, and true or false for a "
    "chat",
    "top_logprobs": f"an integer from 0 to {LOGPROBS_MAX}, and only with logprobs=true",
    "prompt_logprobs": f"{ALLOWED['prompt_logprobs']}; it cannot be sent with stream=true",
}


class RetentionFields(Strict):
    """The fields about reuse of the request's KV: two of OpenAI, one of vLLM and one of Tandem."""

    prompt_cache_retention: str | None = Field(None, description=ALLOWED["prompt_cache_retention"])
    prompt_cache_key: str | None = Field(None, description=ALLOWED["prompt_cache_key"])
    cache_salt: str | None = Field(None, description=ALLOWED["cache_salt"])
    kv_priority: int = Field(PRIORITY_DEFAULT, description=ALLOWED["kv_priority"])

    def retention(self) -> Retention:
        """Converts the fields to a Retention. Raises BadRequest for values that are not allowed."""
        return asked_retention(self.prompt_cache_retention, self.prompt_cache_key, self.kv_priority)


class AgentHints(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    priority: int | None = None


class NvExt(Strict):
    """Dynamo's extensions of OpenAI's API, of which only one has an effect."""

    agent_hints: AgentHints | None = None


class PriorityFields(Strict):
    """The fields about the order of requests that wait: vLLM's and Dynamo's."""

    priority: int | None = Field(None, description=ALLOWED["priority"])
    nvext: NvExt | None = Field(None, description=ALLOWED["nvext"])

    def resolved_priority(self) -> int:
        """Returns the priority that the client sent, lower is earlier. Raises BadRequest."""
        hints = self.nvext.agent_hints if self.nvext is not None else None
        return priority_of(self.priority, hints.priority if hints is not None else None)


class SentKvBudget(Strict):
    policy: str = SINKS_WINDOW
    tokens: int
    sinks: int = SINKS_DEFAULT


class BudgetField(Strict):
    kv_budget: SentKvBudget | None = Field(None, description=ALLOWED["kv_budget"])

    def budget(self) -> KvBudget | None:
        """Returns the KV budget that the client sent, or None. ClientRequest checks the values."""
        return None if self.kv_budget is None else KvBudget(**self.kv_budget.model_dump())


class ChatTextPart(BaseModel):
    """A part of a message. Further keys are ignored: some clients mark parts for a cache."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text"]
    text: str


class ImageUrl(BaseModel):
    """An image. `detail` is ignored: a model has one way of processing images."""

    model_config = ConfigDict(strict=True, extra="ignore")

    url: str = Field(description="a data: URL with a PNG, JPEG, WebP or GIF image")


class ChatImagePart(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["image_url"]
    image_url: ImageUrl


def _refuse_content(value: object) -> None:
    if value:
        raise PydanticCustomError(
            "unsupported", "the field is not supported; leave the field out or send null"
        )


# Type of a message's field that Tandem does not support, such as `audio`. A null or empty value is
# accepted, because OpenAI's answers contain these fields, and clients send answers back as part of
# the conversation.
_Unsupported = Annotated[None, BeforeValidator(_refuse_content)]


def _read_parts(content: object) -> object:
    """Converts files with text, and refusals of earlier answers, to text parts. Raises an error for
    a part of another type."""
    if not isinstance(content, list):
        return content
    content = [_as_known_part(part) for part in content]
    for index, part in enumerate(content):
        if (kind := kind_of(part)) is not None and kind not in _PARTS:
            raise PydanticCustomError(
                "unsupported",
                "part {index} has the type {kind}; allowed are {allowed}",
                {"index": index, "kind": repr(kind[:40]), "allowed": ", ".join(_ALL_PARTS)},
            )
    return content


def _as_known_part(part: object) -> object:
    match part:
        case {"type": "image_url", "image_url": str(url)}:  # some clients send no object
            return {"type": "image_url", "image_url": {"url": url}}
        case {"type": "refusal", "refusal": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "file", "file": dict(file)}:
            return {"type": "text", "text": text_of_file(file)}
    return part


_PARTS = ("text", "image_url")
_ALL_PARTS = (*_PARTS, "file", "refusal")
_Part = Annotated[ChatTextPart | ChatImagePart, Field(discriminator="type")]


class ChatMessage(BaseModel):
    """A message ignores keys that are not named here: some clients keep notes of their own."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: str
    content: Annotated[str | list[_Part] | None, BeforeValidator(_read_parts)] = None
    name: str | None = None
    tool_calls: list[SentToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # newer clients of vLLM use this name for `reasoning_content`
    thinking: str | None = None  # gpt-oss uses this name for `reasoning_content`
    refusal: str | None = None  # of an earlier answer, which has no content then
    audio: _Unsupported = None
    function_call: _Unsupported = None

    @model_validator(mode="after")
    def _read_refusal(self) -> Self:
        if not self.content and self.refusal and self.role == "assistant":
            self.content = self.refusal
        return self

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        """Raises an error for a message without content. The results of tools need no content, and
        neither do answers, which may have had only reasoning that the client does not keep."""
        if self.content is None and self.role not in ("assistant", "tool"):
            raise PydanticCustomError("missing", "the message must have content")
        if self.content is None and not (self.tool_calls or self.thought):
            self.content = ""
        parts = self.content if isinstance(self.content, list) else []
        if self.role != "user" and any(isinstance(part, ChatImagePart) for part in parts):
            raise PydanticCustomError(
                "unsupported", "only messages of the role user may have images"
            )
        return self

    @property
    def thought(self) -> str:
        return self.reasoning_content or self.thinking or self.reasoning or ""

    def to_message(self) -> Message:
        role = _ROLE_ALIASES.get(self.role, self.role)
        fields: dict[str, Any] = {"name": self.name or ""}
        if role == "tool":
            fields["tool_call_id"] = self.tool_call_id or ""
        if role == "assistant":
            fields["tool_calls"] = tuple(call.to_tool_call() for call in self.tool_calls or ())
            fields["reasoning"] = self.thought
        if isinstance(self.content, list):
            parts = [
                part.text if isinstance(part, ChatTextPart) else SentImage(part.image_url.url)
                for part in self.content
            ]
            return Message.of_parts(role, parts, **fields)
        return Message(role, self.content, **fields)


class _Body(StructuredFields, BudgetField, PriorityFields, RetentionFields):
    """Fields that completions and chat completions share."""

    parts = {
        "stream_options": StreamOptions,
        "nvext": NvExt,
        "structured_outputs": StructuredOutputs,
    }

    model: str = Field("", description=ALLOWED["model"])
    temperature: float = Field(1.0, description=ALLOWED["temperature"])
    top_p: float = Field(1.0, description=ALLOWED["top_p"])
    top_k: int = Field(0, description=ALLOWED["top_k"])
    min_p: float = Field(0.0, description=ALLOWED["min_p"])
    seed: int | None = Field(None, description=ALLOWED["seed"])
    max_tokens: int | None = Field(None, description=ALLOWED["max_tokens"])
    stop: str | list[str] = Field([], description=ALLOWED["stop"])
    stop_token_ids: list[int] = Field([], description=ALLOWED["stop_token_ids"])
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = Field(None, description=ALLOWED["stream_options"])
    return_token_ids: bool = False
    presence_penalty: float = Field(0.0, description=ALLOWED["presence_penalty"])
    frequency_penalty: float = Field(0.0, description=ALLOWED["frequency_penalty"])
    repetition_penalty: float = Field(1.0, description=ALLOWED["repetition_penalty"])
    logit_bias: dict[str, float] = Field({}, description=ALLOWED["logit_bias"])
    min_tokens: int = Field(0, description=ALLOWED["min_tokens"])
    bad_words: list[str] = Field([], description=ALLOWED["bad_words"])
    prompt_logprobs: int | None = Field(None, description=_ALLOWED["prompt_logprobs"])
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(None, description=ALLOWED["truncate_prompt_tokens"])
    return_tokens_as_token_ids: bool = False
    echo: bool = False
    add_special_tokens: bool = Field(True, description=ALLOWED["add_special_tokens"])
    n: int = Field(1, description=ALLOWED["n"])
    use_beam_search: bool = Field(False, description=ALLOWED["use_beam_search"])
    length_penalty: float = Field(1.0, description=ALLOWED["length_penalty"])

    default_max_tokens: ClassVar[int | None] = None

    def to_request(self, prompt: Prompt, request_id: str) -> ClientRequest:
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise _refusal("prompt_logprobs")
        if self.use_beam_search and self.stream:
            raise refusal("use_beam_search", why="true")
        return ClientRequest(
            prompt=prompt,
            model=self.model,
            sampling=self.sampling_params(),
            omitted=MODEL_DEFAULTS - self.model_fields_set,
            default_max_tokens=self.default_max_tokens,
            echo=self.echo,
            add_special_tokens=self.add_special_tokens,
            structured_output=self.structured_output(),
            best_of=self.num_made(),
            use_beam_search=self.use_beam_search,
            length_penalty=self.length_penalty,
            retention=self.retention(),
            kv_budget=self.budget(),
            cache_salt=self.cache_salt or "",
            session=self.prompt_cache_key or "",
            priority=self.resolved_priority(),
            request_id=request_id,
        )

    def sampling_params(self) -> SamplingParams:
        """Returns the SamplingParams of the body. Raises BadRequest."""
        same = self.model_dump(include=_SAMPLING)
        measured = {"logprobs": self.num_logprobs(), "prompt_logprobs": self.num_prompt_logprobs()}
        return SamplingParams(**{**same, **measured, "logit_bias": _by_token_id(self.logit_bias)})

    def num_made(self) -> int | None:
        """Returns how many completions are generated, of which the reply has the best `n`. Returns
        None if `n` completions are generated and the reply has all of them."""
        return None

    def num_logprobs(self) -> int | None:
        """Returns how many of the most likely tokens are reported for each generated token, besides
        the generated token itself. Returns None if the client asks for no log probabilities."""
        raise NotImplementedError

    def num_prompt_logprobs(self) -> int | None:
        """Returns how many of the most likely tokens the workers report for each prompt token.
        Returns None if the prompt needs no log probabilities."""
        return self.prompt_logprobs


def _refusal(name: str) -> BadRequest:
    return BadRequest(f"{name} must be {_ALLOWED[name]}", param=name)


def _by_token_id(logit_bias: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token_id): bias for token_id, bias in logit_bias.items()}
    except ValueError:
        raise refusal("logit_bias", why="an object with a key that is not a token id") from None


def prompt_kind(prompt: object) -> str | None:
    if isinstance(prompt, str):
        return "str"
    if not isinstance(prompt, list):
        return None
    return "list[str]" if prompt and isinstance(prompt[0], str | list) else "list[int]"


# A prompt is a text, a list of token ids, or a list of prompts. `prompt_kind` tells pydantic which
# of the three the client sent. Otherwise an error would list problems with all three types.
TextPrompt = Annotated[str, Tag("str")]
TokenIdsPrompt = Annotated[list[int], Tag("list[int]")]
OnePrompt = Annotated[TextPrompt | TokenIdsPrompt, Discriminator(prompt_kind)]
_Prompts = Annotated[list[OnePrompt], Field(max_length=CHOICES_MAX), Tag("list[str]")]


class CompletionBody(_Body):
    field_policy = COMPLETION_POLICY
    default_max_tokens = COMPLETION_MAX_TOKENS

    prompt: Annotated[TextPrompt | TokenIdsPrompt | _Prompts, Discriminator(prompt_kind)] = Field(
        description=_ALLOWED["prompt"]
    )
    logprobs: Annotated[int | None, BeforeValidator(lambda v: None if v is False else v)] = Field(
        None, description=_ALLOWED["logprobs"]
    )
    best_of: int | None = Field(None, description=ALLOWED["best_of"])

    def num_made(self) -> int | None:
        """Returns `best_of`. Raises BadRequest for a stream with `best_of` > `n`, because the best
        completions are known only after all have ended."""
        if self.stream and self.best_of not in (None, self.n):
            raise refusal("best_of", self.best_of)
        return self.best_of

    def num_logprobs(self) -> int | None:
        """Returns `logprobs`. Raises BadRequest if the number is too large."""
        if not 0 <= (self.logprobs or 0) <= LOGPROBS_MAX:
            raise _refusal("logprobs")
        return self.logprobs

    def num_prompt_logprobs(self) -> int | None:
        """Returns `prompt_logprobs`, or if the prompt is echoed, the larger of `prompt_logprobs`
        and `logprobs`."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((num for num in asked if num is not None), default=None)

    def prompts(self) -> list[str] | list[str | list[int]]:
        """Returns the body's prompts as a list. A single prompt becomes a list of one."""
        if prompt_kind(self.prompt) == "list[str]":
            return cast("list[str | list[int]]", self.prompt)
        return [cast("str | list[int]", self.prompt)]


class ConversationFields(Strict):
    """The fields of a chat that say what its prompt is."""

    @classmethod
    def leave_out(cls, body: dict[str, Any]) -> list[str]:
        """Removes tools that the client does not run, and names what messages have in vain."""
        dropped = [f"tools.{name}" for name in drop_tools(body, ("function", CUSTOM))]
        messages = body.get("messages")
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict):
                if message.pop("annotations", None):
                    dropped.append("messages.annotations")
                if message.get("role") == "tool":
                    media = leave_out_media(message, "content", "text")
                    dropped += [f"messages.{kind}" for kind in media]
                if message.get("refusal") and message.get("content"):
                    del message["refusal"]
                    dropped.append("messages.refusal")
        return dropped

    messages: list[ChatMessage] = Field(description=ALLOWED["messages"])
    add_generation_prompt: bool | None = Field(None, description=ALLOWED["add_generation_prompt"])
    continue_final_message: bool = Field(False, description=ALLOWED["continue_final_message"])
    add_special_tokens: bool = Field(False, description=ALLOWED["add_special_tokens"])
    tools: list[Tool] = Field([], description=ALLOWED["tools"])
    tool_choice: SentToolChoice = Field(ToolChoice(), description=ALLOWED["tool_choice"])
    parallel_tool_calls: bool = Field(True, description=ALLOWED["parallel_tool_calls"])
    reasoning_effort: str | None = Field(None, description=ALLOWED["reasoning_effort"])
    chat_template_kwargs: dict[str, Any] = Field({}, description=ALLOWED["chat_template_kwargs"])

    def to_conversation(self) -> Conversation:
        """Converts the fields to a Conversation. Raises BadRequest for an unknown role, and if both
        `add_generation_prompt` and `continue_final_message` are true."""
        head = self.add_generation_prompt
        return Conversation(
            tuple(message.to_message() for message in self.messages),
            tools=tuple(self.tools),
            tool_choice=self.tool_choice.choice,
            only_tool=self.tool_choice.function,
            allowed_tools=self.tool_choice.allowed,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning_effort,
            template_options=self.chat_template_kwargs,
            add_generation_prompt=not self.continue_final_message if head is None else head,
            continue_final_message=self.continue_final_message,
            add_special_tokens=self.add_special_tokens,
        )


class ChatBody(ConversationFields, _Body):
    max_completion_tokens: int | None = Field(None, description=ALLOWED["max_tokens"])
    logprobs: bool = Field(False, description=_ALLOWED["logprobs"])
    top_logprobs: int = Field(0, description=_ALLOWED["top_logprobs"])

    def num_logprobs(self) -> int | None:
        """Returns `top_logprobs` if `logprobs` is true, else None."""
        is_refused = self.top_logprobs and not self.logprobs
        if is_refused or not 0 <= self.top_logprobs <= LOGPROBS_MAX:
            raise _refusal("top_logprobs")
        return self.top_logprobs if self.logprobs else None

    def structured_output(self) -> StructuredOutput | None:
        """Returns the required form of the output, or None. If a tool call is required, the output
        has no text, so `response_format` has no effect."""
        form = super().structured_output()
        has_text = self.tool_choice.choice != "required"
        return form if has_text or form is None or form.field != "response_format" else None


def drop_unknown_fields(kind: type[Strict], body: dict[str, Any]) -> list[str]:
    """Removes the fields that the class `kind` does not know from a body and from its nested
    objects. Returns the names of the removed fields."""
    unknown = kind.field_policy.drop_unknown(body, kind.supported)
    for part, its_kind, sent in _parts_of(kind, body):
        inside = its_kind.field_policy.drop_unknown(sent, its_kind.supported)
        unknown += [f"{part}.{name}" for name in inside]
    return unknown


def hints_in(kind: type[Strict], body: dict[str, Any]) -> list[str]:
    """Returns the names of the fields that have no effect, in a body and in its nested objects."""
    return [
        *kind.field_policy.hints_in(body),
        *(
            f"{part}.{name}"
            for part, its_kind, sent in _parts_of(kind, body)
            for name in its_kind.field_policy.hints_in(sent)
        ),
    ]


def _parts_of(
    kind: type[Strict], body: dict[str, Any]
) -> Iterator[tuple[str, type[Strict], dict[str, Any]]]:
    for part, its_kind in kind.parts.items():
        if isinstance(sent := body.get(part), dict):
            yield part, its_kind, sent


def parse_completion(body: dict[str, Any], request_id: str) -> ParsedRequest:
    """Parses the body of a completion. Raises BadRequest with the name and the allowed values of
    the invalid field."""
    parsed = validate(CompletionBody, body)
    prompts = parsed.prompts()
    requests = []
    for index, prompt in enumerate(prompts):
        try:
            request = parsed.to_request(
                prompt if isinstance(prompt, str) else tuple(prompt),
                request_id if len(prompts) == 1 else f"{request_id}-{index}",
            )
        except BadRequest as error:
            is_about_one = error.param == "prompt" and len(prompts) > 1
            raise name_prompt(error, index) if is_about_one else error from None
        requests.append(request)
    num_sequences = len(requests) * requests[0].num_sequences
    if num_sequences > CHOICES_MAX:
        name = "n" if requests[0].num_sequences == parsed.n else "best_of"
        raise refusal(name, why=f"{requests[0].num_sequences} for each of {len(requests)} prompts")
    return _parsed_request(parsed, request_id, *requests)


def parse_chat(body: dict[str, Any], request_id: str) -> ParsedRequest:
    """Parses the body of a chat. Raises BadRequest with the name and the allowed values of the
    invalid field."""
    parsed = validate(ChatBody, body)
    if parsed.max_tokens is None:
        parsed.max_tokens = parsed.max_completion_tokens
    elif parsed.max_completion_tokens is not None:
        raise BadRequest(
            "only one of max_tokens and max_completion_tokens may be sent", param="max_tokens"
        )
    request = parsed.to_request(parsed.to_conversation(), request_id)
    custom = custom_names(body.get("tools"))
    return replace(_parsed_request(parsed, request_id, request), custom_tools=custom)


def _parsed_request(body: _Body, request_id: str, *requests: ClientRequest) -> ParsedRequest:
    options = body.stream_options or StreamOptions()
    return ParsedRequest(
        request_id=request_id,
        requests=requests,
        stream=body.stream,
        include_usage=options.include_usage,
        continuous_usage=options.include_usage and options.continuous_usage_stats,
        return_token_ids=body.return_token_ids,
        prompt_logprobs=body.prompt_logprobs,
        tokens_as_ids=body.return_tokens_as_token_ids,
    )


_BodyT = TypeVar("_BodyT", bound=Strict)


def validate(kind: type[_BodyT], body: dict[str, Any]) -> _BodyT:
    """Checks a body against the pydantic class `kind`. Raises BadRequest with the name and the
    allowed values of the invalid field."""
    try:
        return kind.model_validate(kind.field_policy.acted_on(body, kind.supported))
    except ValidationError as error:
        raise _as_bad_request(error, {**_ALLOWED, **kind.allowed}) from None


def _as_bad_request(error: ValidationError, allowed: Mapping[str, str]) -> BadRequest:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = first["loc"]
    name = str(place[0])
    is_missing = first["type"] == "missing" and len(place) == 1
    verb = "is missing; it" if is_missing else "is not valid; it"
    # If a field may have several types, pydantic's location of the error also has the name of a
    # type, such as prompt.str. The name of the type is left out.
    inside = [str(part) for part in place[1:7] if part not in _ALTERNATIVES]
    where = ".".join([name, *inside])
    # Messages of Tandem's own validators are shown. Messages of pydantic are replaced by the text
    # in `allowed`, which says more.
    is_ours = first["type"] == "unsupported"
    detail = f" ({where}: {first['msg']})" if inside or is_ours else ""
    return BadRequest(f"{name} {verb} must be {allowed[name]}{detail}", param=name)

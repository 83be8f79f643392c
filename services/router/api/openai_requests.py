"""Bodies of OpenAI's completions and chat completions, and their way into a GenerationRequest.

pydantic checks types here; ranges are checked in one place for HTTP and gRPC, in `request`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from services.errors import BadRequest
from services.router.api.openai_fields import strip_unused
from services.router.request import (
    ALLOWED,
    Conversation,
    GenerationRequest,
    Message,
    Prompt,
    Sampling,
    refusal,
)

# OpenAI's and vLLM's default for completions; chats run to the end of the context.
COMPLETION_MAX_TOKENS = 16
_ROLE_ALIASES = {"developer": "system"}
_ALTERNATIVES = ("str", "list[int]", "list[str]")


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False  # vLLM's; without include_usage it has no effect


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text"]
    text: str


def _refuse_content(value: object) -> None:
    if value:
        raise PydanticCustomError("unsupported", "it is not supported; leave it out or send null")


# A part of a message that Tandem does not act on. Answers have it too, empty or null, and clients
# put them back into the conversation.
_Unsupported = Annotated[None, BeforeValidator(_refuse_content)]


class ChatMessage(BaseModel):
    """Keys that are not named here are ignored: some clients keep notes of their own in messages."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: str
    content: str | list[TextPart]
    name: str | None = None
    annotations: _Unsupported = None
    audio: _Unsupported = None
    function_call: _Unsupported = None
    reasoning_content: _Unsupported = None
    refusal: _Unsupported = None
    tool_calls: _Unsupported = None

    def to_message(self) -> Message:
        text = self.content
        if not isinstance(text, str):
            text = "".join(part.text for part in text)
        return Message(role=_ROLE_ALIASES.get(self.role, self.role), content=text)


class _Body(BaseModel):
    """What completions and chat completions share."""

    model_config = ConfigDict(strict=True, extra="forbid")

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

    supported: ClassVar[frozenset[str]]

    def to_request(
        self,
        *,
        prompt: Prompt,
        request_id: str,
        max_tokens: int | None,
        default_max_tokens: int | None = None,
    ) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options")
        return GenerationRequest(
            prompt=prompt,
            model=self.model,
            sampling=Sampling(
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                seed=self.seed,
            ),
            max_tokens=max_tokens,
            default_max_tokens=default_max_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            request_id=request_id,
        )


class CompletionBody(_Body):
    prompt: str | list[int] = Field(description=ALLOWED["prompt"])

    @field_validator("prompt", mode="before")
    @classmethod
    def _unwrap(cls, prompt: object) -> object:
        """Some clients send a list of prompts even for one."""
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            return prompt[0]
        return prompt


class ChatBody(_Body):
    messages: list[ChatMessage] = Field(description=ALLOWED["messages"])
    max_completion_tokens: int | None = Field(None, description=ALLOWED["max_tokens"])


CompletionBody.supported = frozenset(CompletionBody.model_fields)
ChatBody.supported = frozenset(ChatBody.model_fields)


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request and how its client wants the answer told."""

    request: GenerationRequest
    stream: bool
    include_usage: bool
    continuous_usage: bool  # in each chunk: its choice's so far
    return_token_ids: bool


def parse_completion(body: dict[str, Any], request_id: str) -> ParsedRequest:
    """Raises BadRequest naming the field at fault and what is allowed."""
    parsed = _validate(CompletionBody, body)
    prompt = parsed.prompt if isinstance(parsed.prompt, str) else tuple(parsed.prompt)
    request = parsed.to_request(
        prompt=prompt,
        request_id=request_id,
        max_tokens=parsed.max_tokens,
        default_max_tokens=COMPLETION_MAX_TOKENS,
    )
    return _told(parsed, request)


def parse_chat(body: dict[str, Any], request_id: str) -> ParsedRequest:
    """Raises BadRequest naming the field at fault and what is allowed."""
    parsed = _validate(ChatBody, body)
    if parsed.max_tokens is not None and parsed.max_completion_tokens is not None:
        raise BadRequest(
            "only one of max_tokens and max_completion_tokens may be sent", param="max_tokens"
        )
    limit = parsed.max_completion_tokens
    request = parsed.to_request(
        prompt=Conversation(tuple(m.to_message() for m in parsed.messages)),
        request_id=request_id,
        max_tokens=parsed.max_tokens if limit is None else limit,
    )
    return _told(parsed, request)


def _told(body: _Body, request: GenerationRequest) -> ParsedRequest:
    options = body.stream_options or StreamOptions()
    return ParsedRequest(
        request=request,
        stream=body.stream,
        include_usage=options.include_usage,
        continuous_usage=options.include_usage and options.continuous_usage_stats,
        return_token_ids=body.return_token_ids,
    )


_BodyT = TypeVar("_BodyT", bound=_Body)


def _validate(kind: type[_BodyT], body: dict[str, Any]) -> _BodyT:
    try:
        return kind.model_validate(strip_unused(body, kind.supported))
    except ValidationError as error:
        raise _as_bad_request(error) from None


def _as_bad_request(error: ValidationError) -> BadRequest:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = first["loc"]
    name = str(place[0])
    verb = (
        "is missing; it" if first["type"] == "missing" and len(place) == 1 else "is not valid; it"
    )
    # Names of the alternatives of a union, such as `str`, are pydantic's and tell a client nothing.
    inside = [str(part) for part in place[1:4] if part not in _ALTERNATIVES]
    where = ".".join([name, *inside])
    detail = f" ({where}: {first['msg']})" if inside else ""
    return BadRequest(f"{name} {verb} must be {ALLOWED[name]}{detail}", param=name)

"""A checked generation request: HTTP and gRPC both translate into it.

A `ClientRequest` that exists is valid, but for what only the model can tell (`check_against`).
Every refusal names the field and says what is allowed. Knows no wire format.
"""

import math
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tandem.errors import BadRequest, ContextTooLong, ModelNotFound, OverKeyLimit
from tandem.security.limits import NO_LIMITS, Limits

STOP_STRINGS_MAX = 4
STOP_CHARACTERS_MAX = 1024
STOP_TOKEN_IDS_MAX = 128
MESSAGES_MAX = 4096
TOP_K_MAX = 2**31 - 1
MAX_TOKENS_MAX = 2**31 - 1
# No text of a longer average token is worth tokenizing only to be refused.
CHARACTERS_PER_TOKEN_MAX = 64
# Below it the division of logits by the temperature leaves float32; vLLM clamps there too.
TEMPERATURE_MIN = 0.01

TOOLS_MAX = 1024
NESTING_MAX = 64  # of a tool's schema, or of a call's arguments

ROLES = ("system", "user", "assistant", "tool")
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")

REQUEST_ID_HEADER = "x-request-id"
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

ALLOWED = {
    "model": "the name of the served model",
    "prompt": "a non-empty string, or one list of token ids",
    "messages": "a non-empty list of messages, each with a role (system, user, assistant or tool) "
    'and a content that is a string or a list of {"type": "text", "text": ...} parts',
    "tools": f'a list of at most {TOOLS_MAX} tools such as {{"type": "function", "function": '
    '{"name": ..., "parameters": ...}}',
    "tool_choice": "auto or none; required and a named function need a grammar, which is not "
    "supported yet",
    "parallel_tool_calls": "true or false",
    "reasoning_effort": f"one of {', '.join(REASONING_EFFORTS)}",
    "chat_template_kwargs": "an object with variables of the model's chat template",
    "temperature": "a number from 0 (greedy) to 2",
    "top_p": "a number over 0 and at most 1",
    "top_k": "an integer: -1 or 0 (off), or a count of tokens",
    "min_p": "a number from 0 (off) to 1",
    "seed": "an integer from -2^63 to 2^64-1",
    "max_tokens": "an integer of at least 1",
    "max_completion_tokens": "an integer of at least 1",
    "stop": f"a non-empty string of at most {STOP_CHARACTERS_MAX} characters, or a list of at "
    f"most {STOP_STRINGS_MAX} such strings",
    "stop_token_ids": f"a list of at most {STOP_TOKEN_IDS_MAX} token ids of the vocabulary",
    "ignore_eos": "true or false",
    "stream": "true or false",
    "stream_options": 'an object such as {"include_usage": true}, and only with stream=true',
    "return_token_ids": "true or false",
    "add_special_tokens": "true or false",
    "add_generation_prompt": "true or false, and not true with continue_final_message",
    "continue_final_message": "true or false",
    "return_token_strs": "true or false",
    "skip_special_tokens": "true or false",
    "tokens": "a list of token ids of the vocabulary, at most as many as the context has",
}


def refusal(name: str, given: object = None) -> BadRequest:
    """Returns the error for a field whose value is not among what `ALLOWED` says."""
    shown = "" if given is None else f"; it is {_shorten(given)}"
    return BadRequest(f"{name} must be {ALLOWED[name]}{shown}", param=name)


def name_prompt(error: BadRequest, index: int) -> BadRequest:
    """Returns the same refusal with a message that says which of several prompts it is about."""
    return type(error)(f"prompt {index} (from 0): {error.message}", param=error.param)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made in an earlier answer."""

    id: str
    name: str
    arguments: Mapping[str, Any]

    def template_input(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str | None  # None: of an assistant that only called tools
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""  # of the speaker; of a tool, its function
    reasoning: str = ""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            allowed = ", ".join(ROLES)
            raise BadRequest(
                f"role must be one of {allowed}; it is {_shorten(self.role)}", param="messages"
            )

    def template_input(self) -> dict[str, Any]:
        """Returns what a chat template gets: as for transformers, only what was sent."""
        given: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            given["tool_calls"] = [call.template_input() for call in self.tool_calls]
        sent = {
            "tool_call_id": self.tool_call_id,
            "name": self.name,
            "reasoning_content": self.reasoning,
        }
        return given | {name: value for name, value in sent.items() if value}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages and tools to render with the model's chat template, and how the prompt ends: with
    the head of an answer, after the last message, or within it if `continue_final_message`."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()  # as the client wrote them
    may_call: bool = True
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False  # those of a plain text; a template has its own

    def __post_init__(self) -> None:
        if self.add_generation_prompt and self.continue_final_message:
            raise refusal("add_generation_prompt", "true")
        if len(self.tools) > TOOLS_MAX:
            raise refusal("tools", f"a list of {len(self.tools)}")
        if self.reasoning_effort not in (None, *REASONING_EFFORTS):
            raise refusal("reasoning_effort", self.reasoning_effort)
        calls = [c.arguments for m in self.messages for c in m.tool_calls]
        for name, value in (
            ("tools", self.tools),
            ("messages", calls),
            ("chat_template_kwargs", self.template_options),
        ):
            if not _is_nested_within(value, NESTING_MAX + 2):
                message = f"{name} has values that are nested deeper than {NESTING_MAX} levels"
                raise BadRequest(message, param=name)

    def template_input(
        self,
    ) -> tuple[list[dict[str, Any]], list[Mapping[str, Any]] | None, Mapping[str, Any]]:
        """Returns messages, tools and options, as `Tokenizer.encode_chat` takes them."""
        messages = [message.template_input() for message in self.messages]
        return messages, list(self.tools) or None, self.template_options

    @property
    def num_characters(self) -> int:
        beyond = sum(map(_num_characters, (self.tools, self.template_options)))
        return beyond + sum(
            len(m.content or "")
            + len(m.reasoning)
            + sum(len(c.name) + _num_characters(c.arguments) for c in m.tool_calls)
            for m in self.messages
        )


Prompt = str | tuple[int, ...] | Conversation


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling as requested; temperature 0 is greedy, top_k 0, top_p 1 and min_p 0 are off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        # Written so that NaN fails.
        if not 0.0 <= self.temperature <= 2.0:
            raise refusal("temperature", self.temperature)
        if not 0.0 < self.top_p <= 1.0:
            raise refusal("top_p", self.top_p)
        if not 0.0 <= self.min_p <= 1.0:
            raise refusal("min_p", self.min_p)
        if not -1 <= self.top_k <= TOP_K_MAX:
            raise refusal("top_k", self.top_k)
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise refusal("seed", self.seed)

    @property
    def effective_temperature(self) -> float:
        return 0.0 if self.temperature == 0.0 else max(self.temperature, TEMPERATURE_MIN)


@dataclass(frozen=True, slots=True)
class ClientRequest:
    prompt: Prompt
    model: str = ""  # empty: the served model
    sampling: Sampling = Sampling()
    max_tokens: int | None = None  # None: `default_max_tokens`, or what the context leaves
    default_max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    add_special_tokens: bool = True  # of a prompt that is a text
    tenant: str = ""  # empty: of nobody's own
    limits: Limits = NO_LIMITS  # of its API key
    client_id: str = ""  # the client's own name for the request; others may have the same
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        if isinstance(self.prompt, Conversation):
            if not 0 < len(self.prompt.messages) <= MESSAGES_MAX:
                raise refusal("messages", f"a list of {len(self.prompt.messages)}")
        elif not self.prompt:
            raise refusal("prompt", "empty")
        if self.max_tokens is not None and not 1 <= self.max_tokens <= MAX_TOKENS_MAX:
            raise refusal("max_tokens", self.max_tokens)
        if len(self.stop) > STOP_STRINGS_MAX:
            raise refusal("stop", f"a list of {len(self.stop)}")
        if any(not 0 < len(s) <= STOP_CHARACTERS_MAX for s in self.stop):
            raise refusal("stop", "one with an empty or too long string")
        if len(self.stop_token_ids) > STOP_TOKEN_IDS_MAX:
            raise refusal("stop_token_ids", f"a list of {len(self.stop_token_ids)}")

    def check_against(self, *, model: str, vocab_size: int, max_model_len: int) -> None:
        """Checks what it can before the prompt is tokenized. Raises BadRequest, ModelNotFound."""
        check_model(self.model, served=model)
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        if isinstance(self.prompt, tuple):
            check_token_ids("prompt", self.prompt, vocab_size)
            self.completion_limit(len(self.prompt), max_model_len)
        characters = num_characters(self.prompt)
        characters_max = CHARACTERS_PER_TOKEN_MAX * max_model_len
        if characters > characters_max:
            raise ContextTooLong(
                f"{_context(max_model_len)}; the prompt has {characters} characters, and "
                f"may have at most {characters_max}",
                param=self._prompt_name,
            )

    def completion_limit(
        self, num_prompt_tokens: int, max_model_len: int, *, pool_tokens: int | None = None
    ) -> int:
        """Returns the completion's limit. Raises ContextTooLong if it and the prompt do not fit,
        and OverKeyLimit if the API key allows less.

        A limit that the client did not name also leaves room in a KV pool of `pool_tokens`.
        """
        left = max_model_len - num_prompt_tokens
        if num_prompt_tokens < 1:
            raise refusal(self._prompt_name, "without any token")
        if left < 1:
            raise self.too_long(f"{num_prompt_tokens}", max_model_len)
        allowed = self._allowed_by_key(num_prompt_tokens)
        if self.max_tokens is None:
            pool_left = left if pool_tokens is None else max(1, pool_tokens - num_prompt_tokens)
            return min(left, pool_left, allowed or left, self.default_max_tokens or left)
        if self.max_tokens > left:
            raise ContextTooLong(
                f"{_context(max_model_len)}; the prompt has {num_prompt_tokens} tokens, so "
                f"max_tokens must be at most {left}; it is {self.max_tokens}",
                param="max_tokens",
            )
        if allowed is not None and self.max_tokens > allowed:
            raise OverKeyLimit(
                f"max_tokens is {self.max_tokens}; it must be at most {allowed}: "
                f"{self._key_limits(num_prompt_tokens)}",
                param="max_tokens",
            )
        return self.max_tokens

    def _allowed_by_key(self, num_prompt_tokens: int) -> int | None:
        """Returns the largest completion that the API key allows; None without such a limit."""
        limits = self.limits
        prompt_max = limits.max_prompt_tokens or math.inf
        if limits.tokens_per_minute:
            prompt_max = min(prompt_max, limits.tokens_per_minute - 1)
        if num_prompt_tokens > prompt_max:
            raise OverKeyLimit(
                f"the prompt has {num_prompt_tokens} tokens; it must have at most {prompt_max}: "
                f"{self._key_limits(num_prompt_tokens)}",
                param=self._prompt_name,
            )
        allowed = limits.max_completion_tokens or math.inf
        if limits.tokens_per_minute:
            allowed = min(allowed, limits.tokens_per_minute - num_prompt_tokens)
        return None if allowed == math.inf else int(allowed)

    def _key_limits(self, num_prompt_tokens: int) -> str:
        limits = self.limits
        named = (
            (limits.max_prompt_tokens, "max_prompt_tokens"),
            (limits.max_completion_tokens, "max_completion_tokens"),
            (limits.tokens_per_minute, "tokens_per_minute"),
        )
        shown = " and ".join(f"{name} {limit}" for limit, name in named if limit)
        return f"the API key has {shown}, and the prompt takes {num_prompt_tokens}"

    def too_long(self, num_prompt_tokens: str, max_model_len: int) -> ContextTooLong:
        """Returns the error for a prompt that leaves no room; the number may be "at least 7"."""
        return ContextTooLong(
            f"{_context(max_model_len)}; the prompt has {num_prompt_tokens} tokens, and may have "
            f"at most {max_model_len - 1}, so that one can be made",
            param=self._prompt_name,
        )

    @property
    def kind(self) -> Literal["chat", "completion"]:
        return "chat" if isinstance(self.prompt, Conversation) else "completion"

    @property
    def _prompt_name(self) -> str:
        return "messages" if isinstance(self.prompt, Conversation) else "prompt"


def read_client_id(sent: Sequence[str]) -> str:
    """Returns the client's id; empty if there is none, several, or one of other characters."""
    return sent[0] if len(sent) == 1 and _CLIENT_ID.fullmatch(sent[0]) else ""


def check_model(name: str, *, served: str) -> None:
    """Raises ModelNotFound for another name than that of the served model."""
    if name not in ("", served):
        message = f"the model {_shorten(name)} is not served here; {served!r} is"
        raise ModelNotFound(message, param="model")


def num_characters(prompt: Prompt) -> int:
    """Counts the characters to tokenize; 0 for token ids."""
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, Conversation):
        return prompt.num_characters
    return 0


def _num_characters(value: Any) -> int:
    """Counts at least the characters that a value adds to a text as JSON, less its marks."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_num_characters(k) + _num_characters(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return sum(map(_num_characters, value))
    return 1


def _is_nested_within(value: Any, levels: int) -> bool:
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return True
    return levels > 0 and all(_is_nested_within(item, levels - 1) for item in value)


def _context(max_model_len: int) -> str:
    # OpenAI's words: clients find them in the message, and shorten the prompt.
    return f"This model's maximum context length is {max_model_len} tokens"


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises BadRequest for an id that is not in the vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise BadRequest(
                f"{name} has the token id {token_id}; ids must be from 0 to {vocab_size - 1}",
                param=name,
            )


def _shorten(value: object) -> str:
    """The value as the message shows it: bounded, and quoted when it is text of the client's."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = str(value) if isinstance(value, int | float) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

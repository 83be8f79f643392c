"""The checked generation request, `ClientRequest`, which the HTTP and gRPC APIs both produce.

The constructor makes all checks that do not need the model; `check_against` makes the others. Every
error names the field and the allowed values. This module knows no wire format.
"""

import math
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import msgspec

from tandem.common.kv_budget import KvBudget, check_budget
from tandem.common.printable import shorten
from tandem.common.retention import NO_RETENTION, PRIORITY_MAX, Retention
from tandem.common.sampling_params import BEAMS_MAX, CHOICES_MAX, SamplingParams
from tandem.errors import BadRequest, ConfigError, ContextTooLong, ModelNotFound, OverKeyLimit
from tandem.models.grammars.text import StructuredOutput
from tandem.models.tokenizer.pair_template import Pair
from tandem.net.security.limits import NO_LIMITS, Limits
from tandem.router.admission.turns import Claim
from tandem.router.placement.hint import PlacementHint
from tandem.router.request.allowed import KEY_CHARACTERS_MAX, LENGTH_PENALTY_MAX, refusal
from tandem.router.request.conversation import Conversation

MESSAGES_MAX = 4096
# A prompt is refused without tokenizing if it has more characters than this number times the
# context length. Example: at most 64 * 8,192 characters with a context of 8,192 tokens.
CHARACTERS_PER_TOKEN_MAX = 64

REQUEST_ID_HEADER = "x-request-id"
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


Prompt = str | tuple[int, ...] | Conversation | Pair
_UNLIMITED = SamplingParams(max_tokens=None)
# Sampling fields whose defaults are read from a model's generation_config.json, as in vLLM. Its
# field `do_sample` has no effect, also as in vLLM.
MODEL_DEFAULTS = frozenset(("temperature", "top_p", "top_k", "min_p", "repetition_penalty"))


@dataclass(frozen=True, slots=True)
class ClientRequest:
    prompt: Prompt
    model: str = ""  # "": the served model
    sampling: SamplingParams = _UNLIMITED
    # Names of the fields in MODEL_DEFAULTS that the client did not send.
    omitted: frozenset[str] = frozenset()
    # Largest number of completion tokens if the client did not set max_tokens. None: as many as the
    # context has after the prompt.
    default_max_tokens: int | None = None
    # The form that the completion must have, such as a JSON schema. None: any text.
    structured_output: StructuredOutput | None = None
    # True: the answer's text begins with the prompt, or with the chat's final assistant message
    echo: bool = False
    embed: bool = False  # True: the answer is the hidden state of the prompt's last token
    # True: max_tokens may be 0, because the client wants only the KV of the prompt in the cache
    may_be_empty: bool = False
    is_whole: bool = False  # True: the answer is sent only when it is complete
    # True: the tokenizer adds special tokens, such as a bos token, to a text prompt.
    add_special_tokens: bool = True
    # Number of completions to generate. The best `n` of these are returned. None: generate `n`.
    best_of: int | None = None
    use_beam_search: bool = False  # True: beam search with `n` beams
    length_penalty: float = 1.0  # exponent of the number of tokens in the score of a beam
    retention: Retention = NO_RETENTION  # how long the client wants the request's KV to be kept
    # The first messages of the chat, if only the KV of these is to be pinned. None: the KV of all
    # messages is pinned.
    pinned_chat: Conversation | None = None
    # Name of the conversation that the request continues. "": the client named none.
    session: str = ""
    priority: int = 0  # lower is earlier
    # Seconds after the arrival within which the first token is of use. None: the client set none.
    deadline_s: float | None = None
    may_shed: bool = False  # True: the request may be refused while it waits
    # Limit of the tokens whose KV is kept. None: the KV of all tokens is kept.
    kv_budget: KvBudget | None = None
    # Requests share KV only with requests of the same salt. "": the client sent none.
    cache_salt: str = ""
    is_batch: bool = False  # True: a line of a batch, which runs only on spare capacity
    tenant: str = ""  # "": no tenant
    limits: Limits = NO_LIMITS  # limits of the request's API key
    # The workers that a Kubernetes endpoint picker has chosen for the request. None: no picker.
    hint: PlacementHint | None = None
    client_id: str = ""  # id that the client sent with the request; not unique
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        if isinstance(self.prompt, Conversation):
            if not 0 < len(self.prompt.messages) <= MESSAGES_MAX:
                raise refusal("messages", why=f"a list of {len(self.prompt.messages)} messages")
            if self.prompt.tool_choice == "required" and self.structured_output is not None:
                raise BadRequest(
                    f"tool_choice and {self.structured_output.field} both set the format of the "
                    "answer; send only one of them",
                    param="tool_choice",
                )
        elif not self.prompt:
            raise refusal("prompt", why="empty")
        needs_token = not (self.echoes_prompt or self.embed or self.may_be_empty)
        if needs_token and self.sampling.max_tokens == 0:
            raise refusal("max_tokens", 0)
        if self.kv_budget is not None:
            check_budget(self.kv_budget)
        if len(self.cache_salt) > KEY_CHARACTERS_MAX:
            raise refusal("cache_salt", why=f"{len(self.cache_salt)} characters long")
        self._check_many()

    def _check_many(self) -> None:
        n = self.sampling.n
        if self.use_beam_search and n > BEAMS_MAX:
            raise refusal("n", n)
        best_of_max = n if self.use_beam_search or self.kind == "chat" else CHOICES_MAX
        if self.best_of is not None and not n <= self.best_of <= best_of_max:
            raise refusal("best_of", self.best_of)
        if not -LENGTH_PENALTY_MAX <= self.length_penalty <= LENGTH_PENALTY_MAX:
            raise refusal("length_penalty", self.length_penalty)
        if self.length_penalty != 1.0 and not self.use_beam_search:
            raise refusal("length_penalty", self.length_penalty)
        if self.use_beam_search and (name := self._is_not_for_beams()):
            raise BadRequest(
                f"{name} cannot be used with use_beam_search; leave out {name}", param=name
            )

    def _is_not_for_beams(self) -> str:
        """Returns a field that the client set and beam search does not support; "" if none."""
        sampling = self.sampling
        chat = self.prompt
        form = self.structured_output
        is_set = {
            "tools": isinstance(chat, Conversation) and bool(chat.tools),
            "structured_output" if form is None else form.field: form is not None,
            "presence_penalty": sampling.presence_penalty != 0.0,
            "frequency_penalty": sampling.frequency_penalty != 0.0,
            "repetition_penalty": sampling.repetition_penalty != 1.0,
            "logit_bias": bool(sampling.logit_bias),
            "min_tokens": sampling.min_tokens > 0,
            "bad_words": bool(sampling.bad_words),
            "stop": bool(sampling.stop),
            "stop_token_ids": bool(sampling.stop_token_ids),
            "logprobs": sampling.logprobs is not None,
            "prompt_logprobs": sampling.prompt_logprobs is not None,
            "echo": self.echo,
            "kv_budget": self.kv_budget is not None,
        }
        return next((name for name, is_wrong in is_set.items() if is_wrong), "")

    def with_defaults(self, defaults: Mapping[str, float]) -> Self:
        """Returns the request with a model's defaults for omitted sampling fields.

        Beam search and embeddings do not sample, so for them the request is returned unchanged.
        """
        if self.use_beam_search or self.embed:
            return self
        used = {name: value for name, value in defaults.items() if name in self.omitted}
        return replace(self, sampling=msgspec.structs.replace(self.sampling, **used))

    @property
    def num_sequences(self) -> int:
        """Number of completions that are generated, including those that `best_of` discards."""
        return max(self.sampling.n, self.best_of or 1)

    @property
    def num_prompt_logprobs(self) -> int:
        """Number of log probabilities in the answer for each prompt token, over all choices.

        Example: `n` = 2 and prompt_logprobs 5 give 2 * (1 + 5) = 12.
        """
        number = self.sampling.prompt_logprobs
        return 0 if number is None else self.sampling.n * (1 + number)

    @property
    def num_logprobs_kept(self) -> int:
        """Number of log probabilities that the router keeps in memory for each position.

        Example: 3 completions with logprobs 5 give 3 * (1 + 5) = 18. The result is 0 if tokens are
        sent to the client as they arrive.
        """
        number = self.sampling.logprobs
        is_kept = self.is_whole or self.num_sequences > self.sampling.n
        return 0 if number is None or not is_kept else self.num_sequences * (1 + number)

    def check_against(self, *, vocab_size: int, max_model_len: int) -> None:
        """Makes the checks that need the model's sizes but no tokenizer. Raises BadRequest.

        The checks concern token ids that the client sent, and lengths.
        """
        check_token_ids("stop_token_ids", self.sampling.stop_token_ids or (), vocab_size)
        check_token_ids("logit_bias", self.sampling.logit_bias or (), vocab_size)
        if isinstance(self.prompt, tuple):
            check_token_ids("prompt", self.prompt, vocab_size)
            kept = self.prompt_tokens_max(max_model_len) or len(self.prompt)
            self.resolved_max_tokens(min(kept, len(self.prompt)), max_model_len)
        characters = num_characters(self.prompt)
        characters_max = CHARACTERS_PER_TOKEN_MAX * max_model_len
        if characters > characters_max:
            raise ContextTooLong(
                f"{_context(max_model_len)}; the prompt has {characters} characters, and "
                f"may have at most {characters_max}",
                param=self._prompt_name,
            )

    def prompt_tokens_max(self, max_model_len: int) -> int | None:
        """Returns how many of the prompt's last tokens are kept; None: all of them."""
        if self.sampling.truncate_prompt_tokens != -1:
            return self.sampling.truncate_prompt_tokens
        room = max(1, self.sampling.max_tokens or 1)
        # A max_tokens beyond the context asks for as many tokens as there are, so the prompt is not
        # truncated for it.
        return max_model_len - (room if room < max_model_len else 1)

    def resolved_max_tokens(
        self, num_prompt_tokens: int, max_model_len: int, *, pool_tokens: int | None = None
    ) -> int:
        """Returns the largest number of completion tokens.

        If the client set max_tokens and the context has room for it, the result is max_tokens.
        Otherwise the result is as large as the context, a KV pool of `pool_tokens`, the API key and
        `default_max_tokens` allow. Raises ContextTooLong if the prompt leaves no room for a
        completion, and OverKeyLimit if the API key allows fewer than max_tokens.
        """
        left = max_model_len - num_prompt_tokens
        if num_prompt_tokens < 1:
            raise refusal(self._prompt_name, why="without any token")
        if left < 1:
            raise self.too_long(f"{num_prompt_tokens}", max_model_len)
        allowed = self._allowed_by_key(num_prompt_tokens)
        max_tokens = self.sampling.max_tokens
        if max_tokens is not None and max_tokens <= left:
            if allowed is not None and max_tokens > allowed:
                raise OverKeyLimit(
                    f"max_tokens is {max_tokens}; it must be at most {allowed}: "
                    f"{self._key_limits(num_prompt_tokens)}",
                    param="max_tokens",
                )
            return max_tokens
        pool_left = left if pool_tokens is None else max(1, pool_tokens - num_prompt_tokens)
        default = left if max_tokens is not None else self.default_max_tokens or left
        limit = min(left, pool_left, allowed or left, default)
        if self.sampling.min_tokens > limit:
            raise BadRequest(
                f"min_tokens is {self.sampling.min_tokens}; it must be at most {limit}, because "
                f"the answer has at most {limit} tokens",
                param="min_tokens",
            )
        return limit

    def check_prompt_limit(self, num_prompt_tokens: int) -> None:
        """Raises OverKeyLimit if the API key does not allow a prompt of this length."""
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

    def _allowed_by_key(self, num_prompt_tokens: int) -> int | None:
        """Returns the largest number of tokens that the API key allows for each completion.

        None means no limit.
        """
        limits = self.limits
        self.check_prompt_limit(num_prompt_tokens)
        allowed = limits.max_completion_tokens or math.inf
        if limits.tokens_per_minute:
            allowed = min(allowed, limits.tokens_per_minute - num_prompt_tokens)
        if allowed < self.num_sequences:
            name = "n" if self.sampling.n == self.num_sequences else "best_of"
            raise OverKeyLimit(
                f"{name} is {self.num_sequences}; it must be at most {int(allowed)}. The API "
                "key limits the tokens of all choices together: "
                f"{self._key_limits(num_prompt_tokens)}",
                param=name,
            )
        return None if allowed == math.inf else int(allowed) // self.num_sequences

    def _key_limits(self, num_prompt_tokens: int) -> str:
        limits = self.limits
        named = (
            (limits.max_prompt_tokens, "max_prompt_tokens"),
            (limits.max_completion_tokens, "max_completion_tokens"),
            (limits.tokens_per_minute, "tokens_per_minute"),
        )
        shown = " and ".join(f"{name} {limit}" for limit, name in named if limit)
        return f"the API key has {shown}, and the prompt has {num_prompt_tokens} tokens"

    def too_long(self, num_prompt_tokens: str, max_model_len: int) -> ContextTooLong:
        """Returns the error for a prompt that leaves no room for a completion.

        `num_prompt_tokens` is text, such as "at least 7".
        """
        return ContextTooLong(
            f"{_context(max_model_len)}; the prompt has {num_prompt_tokens} tokens, and may have "
            f"at most {max_model_len - 1}, so that one token can be generated",
            param=self._prompt_name,
        )

    @property
    def echoes_prompt(self) -> bool:
        """True if the prompt's tokens are part of the answer."""
        return self.echo and not isinstance(self.prompt, Conversation)

    @property
    def wishes(self) -> Retention:
        """The retention of the request's KV: the client's wishes within the limits of its API key.

        The field `returns` says that the prompt will probably be sent again. It is True if the
        client says so, requests a pin, names a session, sends tools, or sends an earlier answer.
        """
        retention = self.retention
        chat = self.prompt
        returns = retention.returns or retention.pin_s > 0 or bool(self.session)
        if isinstance(chat, Conversation) and not returns:
            has_answer = any(message.role == "assistant" for message in chat.messages)
            returns = has_answer or bool(chat.callable_tools)
        priority = min(retention.priority, self.limits.max_kv_priority or PRIORITY_MAX)
        return Retention(returns, retention.pin_s, self.limits.weight, priority=priority)

    @property
    def claim(self) -> Claim:
        """What decides when the request has its turn, without its cost."""
        return Claim(
            self.tenant,
            weight=self.limits.weight,
            session=self.session,
            priority=max(self.priority, self.limits.earliest_priority),
            may_shed=self.may_shed or self.limits.may_shed,
        )

    @property
    def kind(self) -> Literal["chat", "completion", "embedding"]:
        if self.embed:
            return "embedding"
        return "chat" if isinstance(self.prompt, Conversation) else "completion"

    @property
    def _prompt_name(self) -> str:
        return "messages" if isinstance(self.prompt, Conversation) else "prompt"


def read_model_defaults(generation_config: Mapping[str, Any]) -> dict[str, float]:
    """Returns the sampling defaults of a generation_config.json.

    Raises ConfigError for a value that is not allowed in a request.
    """
    sent = {n: generation_config[n] for n in sorted(MODEL_DEFAULTS & generation_config.keys())}
    defaults = {name: value for name, value in sent.items() if value is not None}
    try:
        for name, value in defaults.items():
            kinds = int if name == "top_k" else int | float
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise refusal(name, value)
        SamplingParams(**defaults)
    except BadRequest as error:
        raise ConfigError(
            f"{error.message}. Correct generation_config.json, or start with "
            "--generation-config none to ignore the file"
        ) from None
    return defaults


def read_client_id(sent: Sequence[str]) -> str:
    """Returns the client's own id of a request; "" unless exactly one valid id was sent."""
    return sent[0] if len(sent) == 1 and _CLIENT_ID.fullmatch(sent[0]) else ""


def check_model(name: str, *, served: str, aliases: Sequence[str] = ()) -> None:
    """Raises ModelNotFound unless `name` is empty, the served model's name or one of its aliases.

    In an alias, `*` stands for any characters, such as in `claude-*`.
    """
    if name not in ("", served) and not is_alias(name, aliases):
        message = f"the model {shorten(name)} is not served here; the served model is {served!r}"
        raise ModelNotFound(message, param="model")


def is_alias(name: str, aliases: Sequence[str]) -> bool:
    """Returns whether one of the aliases, in which `*` stands for any characters, is `name`."""
    return any(_is_named(name, *alias.split("*")) for alias in aliases)


def _is_named(name: str, first: str, *parts: str) -> bool:
    """Returns whether `name` consists of `first` and `parts`, with any characters between them."""
    if not parts:
        return name == first
    *inner, last = parts
    if not name.startswith(first):
        return False
    at = len(first)
    for part in inner:
        if (found := name.find(part, at)) < 0:
            return False
        at = found + len(part)
    return name.endswith(last) and len(name) - len(last) >= at


def num_characters(prompt: Prompt) -> int:
    """Returns the number of characters to tokenize; 0 for token ids."""
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, Conversation | Pair):
        return prompt.num_characters
    return 0


def _context(max_model_len: int) -> str:
    # This is the text of OpenAI's message. Some clients search for it, and then shorten the prompt.
    return f"This model's maximum context length is {max_model_len} tokens"


def check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raises BadRequest if a token id is not in the vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise BadRequest(
                f"{name} has the token id {token_id}, which is out of vocabulary; ids must be "
                f"from 0 to {vocab_size - 1} (vocabulary size: {vocab_size})",
                param=name,
            )

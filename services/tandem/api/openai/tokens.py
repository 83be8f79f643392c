"""Request bodies of /tokenize and /detokenize, compatible with vLLM and SGLang.

A body has either a prompt, which is tokenized like the prompt of a completion, or messages, which
are tokenized like the messages of a chat. The fields and defaults are those of completions and
chats.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from tandem.api.openai.requests import ConversationFields, validate
from tandem.api.openai.structured import Strict
from tandem.common.sampling_params import CHOICES_MAX
from tandem.router.request.allowed import ALLOWED
from tandem.router.request.request import ClientRequest


class _TokenizeFields(Strict):
    model: str = Field("", description=ALLOWED["model"])
    return_token_strs: bool = Field(False, description=ALLOWED["return_token_strs"])


class TokenizePromptBody(_TokenizeFields):
    """One prompt, or several: then the answer has a list of tokens and a count for each."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=CHOICES_MAX)]
    add_special_tokens: bool = Field(True, description=ALLOWED["add_special_tokens"])

    def requests(self) -> list[ClientRequest]:
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        return [
            ClientRequest(prompt, self.model, add_special_tokens=self.add_special_tokens)
            for prompt in prompts
        ]


class TokenizeChatBody(ConversationFields, _TokenizeFields):
    """The messages of a chat."""

    def requests(self) -> list[ClientRequest]:
        return [ClientRequest(self.to_conversation(), self.model)]


class DetokenizeBody(Strict):
    """The ids of one text."""

    model: str = Field("", description=ALLOWED["model"])
    tokens: list[int] = Field(description=ALLOWED["tokens"])
    skip_special_tokens: bool = Field(False, description=ALLOWED["skip_special_tokens"])


TokenizeBody = TokenizePromptBody | TokenizeChatBody


def kind_of(body: dict[str, Any]) -> type[TokenizeBody]:
    """Selects the class of a body of /tokenize. A body with `messages` is a chat."""
    return TokenizeChatBody if "messages" in body else TokenizePromptBody


def parse_tokenize(body: dict[str, Any], tenant: str) -> tuple[TokenizeBody, list[ClientRequest]]:
    """Validates a body of /tokenize. Returns the validated body and one request for each prompt.
    Raises BadRequest."""
    parsed = validate(kind_of(body), body)
    return parsed, [replace(request, tenant=tenant) for request in parsed.requests()]


def tokenize_reply(
    body: TokenizeBody,
    tokens: Sequence[list[int]],
    token_strs: Sequence[list[str]] | None,
    *,
    max_model_len: int,
) -> dict[str, Any]:
    """Builds the reply body of /tokenize. If the client sent a list of prompts, `count`, `tokens`
    and `token_strs` are lists with an entry for each prompt."""
    is_list = isinstance(body, TokenizePromptBody) and isinstance(body.prompt, list)
    counts = [len(ids) for ids in tokens]
    return {
        "count": counts if is_list else counts[0],
        "max_model_len": max_model_len,
        "tokens": tokens if is_list else tokens[0],
        "token_strs": token_strs if is_list or token_strs is None else token_strs[0],
    }

"""Formats log probabilities: those of generated tokens in OpenAI's format, and those of prompt
tokens in vLLM's format.

In a completion, `text_offset` has the position of each token in the choice's text: the number of
characters in the texts of all earlier tokens. A character that is split between two
tokens is counted twice, so later positions are too large.
"""

from typing import Any

from tandem.api.openai.parsed import ParsedRequest
from tandem.models.tokenizer.tokenizer import Tokenizer
from tandem.net.rpc.tandem.v1.worker_pb2 import LogprobEntry
from tandem.router.request.delta import Delta
from tandem.router.request.request import ClientRequest

_LEAST = -9999.0  # sent instead of minus infinity, which JSON does not have


class ChoiceLogprobs:
    """Formats the log probabilities of one choice. The methods must get the choice's deltas in
    order."""

    def __init__(self, tokenizer: Tokenizer, parsed: ParsedRequest, request: ClientRequest) -> None:
        self._tokenizer = tokenizer
        self._parsed = parsed
        self._request = request
        self._offset = 0  # number of characters in the texts of all tokens so far

    def chat(self, delta: Delta) -> dict[str, list[Any]]:
        """Formats a delta's tokens as the `logprobs` of a chat."""
        content = []
        for token_id, measured in zip(delta.token_ids, delta.logprobs, strict=True):
            top = zip(measured.top_ids, measured.top_logprobs, strict=True)
            entry = self._chat_entry(token_id, measured.logprob)
            content.append({**entry, "top_logprobs": [self._chat_entry(*one) for one in top]})
        return {"content": content}

    def completion(self, delta: Delta) -> dict[str, list[Any]]:
        """Formats a delta's tokens as the `logprobs` of a completion. If the client asks for an
        echo of the prompt, the result for the first delta begins with the prompt's tokens."""
        columns: dict[str, list[Any]] = {
            name: [] for name in ("text_offset", "token_logprobs", "tokens", "top_logprobs")
        }
        num_top = self._request.sampling.logprobs or 0
        tokens: list[tuple[int, LogprobEntry | None]] = []
        if self._request.echoes_prompt and delta.prompt_token_ids:
            # The first token of the prompt has no log probability.
            measured_prompt = [None, *delta.prompt_logprobs]
            tokens += zip(delta.prompt_token_ids, measured_prompt, strict=True)
        tokens += zip(delta.token_ids, delta.logprobs, strict=True)
        for token_id, measured in tokens:
            columns["tokens"].append(self._name(token_id))
            columns["text_offset"].append(self._offset)
            self._offset += self._num_characters(token_id)
            logprob = None
            top = None
            if measured is not None:
                logprob = max(measured.logprob, _LEAST)
                pairs = zip(measured.top_ids[:num_top], measured.top_logprobs, strict=False)
                # vLLM's clients expect the chosen token before the most likely tokens.
                top = {self._name(token_id): logprob}
                top |= {self._name(one): max(value, _LEAST) for one, value in pairs}
            columns["token_logprobs"].append(logprob)
            columns["top_logprobs"].append(top)
        return columns

    def prompt(self, delta: Delta) -> list[dict[str, Any] | None]:
        """Formats the log probabilities of the prompt's tokens. `delta` is the choice's first
        delta. For each prompt token, the result has a dict: token id -> log probability, rank and
        text. The first prompt token has None instead."""
        num_top = self._parsed.prompt_logprobs
        entries: list[dict[str, Any] | None] = [None]
        token_ids = (delta.prompt_token_ids or [])[1:]
        for token_id, measured in zip(token_ids, delta.prompt_logprobs, strict=True):
            pairs = zip(measured.top_ids[:num_top], measured.top_logprobs, strict=False)
            ranked = [(one, value, rank) for rank, (one, value) in enumerate(pairs, start=1)]
            own = (token_id, measured.logprob, measured.rank)
            entries.append(
                {
                    str(one): {
                        "logprob": max(value, _LEAST),
                        "rank": rank,
                        "decoded_token": self._text(one),
                    }
                    for one, value, rank in (*ranked, own)
                }
            )
        return entries

    def _chat_entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._name(token_id),
            "logprob": max(logprob, _LEAST),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._parsed.tokens_as_ids else self._text(token_id)

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")

    def _num_characters(self, token_id: int) -> int:
        if self._request.sampling.skip_special_tokens and self._tokenizer.is_special(token_id):
            return 0
        return len(self._text(token_id))

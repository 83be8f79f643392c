"""Converts the token ids of a completion into text, while they are generated.

The token ids are detokenized. The text is cut at a stop string, and split by a parser into content,
reasoning and tool calls. When a stop string ends the text, the caller must cancel the sequence.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from tandem.models.tokenizer.detokenizer import IncrementalDetokenizer
from tandem.models.tokenizer.stop import StopStrings
from tandem.models.tokenizer.tokenizer import Tokenizer
from tandem.router.parsers.machine import AnswerParser, CallDelta
from tandem.router.parsers.model_format import ModelFormat
from tandem.router.request.conversation import Conversation
from tandem.router.request.job import PreparedRequest
from tandem.router.request.prompt.formats import answer_parser


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of a completion, and the tokens from which the text was made.

    If a stop string or a call ended the text, the tokens after it are left out.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    # The client's stop string or stop token id that ended the text. None: neither ended it.
    stop_reason: str | int | None = None
    reasoning: str = ""
    tool_calls: tuple[CallDelta, ...] = ()
    num_reasoning: int = 0  # number of reasoning tokens since the start, including the tags' tokens


class TextStream:
    """Converts the tokens of one completion into text while the tokens arrive."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        parser: AnswerParser | None = None,
        *,
        stop_token_ids: Collection[int] = (),
        shows_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        prompt_text: str = "",
    ) -> None:
        """Creates the stream of one completion.

        - `parser` splits the text. None: all text is content.
        - `shows_stop` is True if the text includes the stop string or stop token that ended it.
        - `min_tokens` is the number of first tokens that are not searched for stop strings.
        - `prompt_text` is put before the completion's text.
        """
        # The parser needs the text of the special tokens that separate content, reasoning and
        # calls, even with `skip_special_tokens`.
        shown = frozenset() if parser is None else tokenizer.special_ids(parser.terminals)
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, shown=shown
        )
        self._parser = parser
        self._stop = StopStrings(stop, is_shown=shows_stop) if stop else None
        self._stop_token_ids = stop_token_ids
        self._shows_stop = shows_stop
        self._num_unstopped = min_tokens
        self._prompt_text = prompt_text
        self._num_reasoning = 0
        # Number of last tokens that may be the beginning of a tag that opens reasoning. They count
        # as reasoning tokens only if the tag is completed.
        self._num_undecided = 0

    def push(self, token_ids: list[int], finish_reason: str) -> Piece:
        """Takes new tokens and returns the new text.

        With a `finish_reason`, all text that was held back is returned, too. If the last token
        ended the completion (an end-of-sequence token or one of the client's stop ids), this token
        is in the piece's `token_ids`, but in the text only with `shows_stop`.
        """
        piece = self._parsed(token_ids, finish_reason)
        if self._prompt_text:
            piece = replace(piece, text=self._prompt_text + piece.text)
            self._prompt_text = ""
        return piece

    def _parsed(self, token_ids: list[int], finish_reason: str) -> Piece:
        """Returns the new text, split by the parser.

        While the text is or may become reasoning, tokens are parsed one by one, so that the
        reasoning tokens can be counted. So are those of an answer that ends after its first call,
        so that the piece has no token after the call.
        """
        parser = self._parser
        if parser is None:
            return self._detokenize(token_ids, finish_reason)
        made: Piece | None = None
        at = 0
        while at < len(token_ids) - 1 and (
            parser.in_reasoning or parser.may_begin_reasoning or parser.ends_after_call
        ):
            one = self._counted(token_ids[at : at + 1], "", parser)
            made = one if made is None else _joined(made, one)
            if one.finish_reason:  # a stop string or a call ended the text
                return made
            at += 1
        last = self._counted(token_ids[at:], finish_reason, parser)
        return last if made is None else _joined(made, last)

    def _counted(self, token_ids: list[int], finish_reason: str, parser: AnswerParser) -> Piece:
        was_reasoning = parser.in_reasoning
        piece = _split(self._detokenize(token_ids, finish_reason), parser)
        self._num_undecided += len(piece.token_ids)
        if was_reasoning or parser.in_reasoning:
            self._num_reasoning += self._num_undecided
        if not parser.may_begin_reasoning:
            self._num_undecided = 0
        return replace(piece, num_reasoning=self._num_reasoning)

    def _detokenize(self, token_ids: list[int], finish_reason: str) -> Piece:
        is_stopped = finish_reason == "stop" and bool(token_ids)
        ended_by = token_ids[-1] if is_stopped and token_ids[-1] in self._stop_token_ids else None
        shown = token_ids[:-1] if is_stopped and not self._shows_stop else token_ids
        if self._stop is None:
            text = self._detokenizer.push(shown)
            return Piece(text + self._rest(finish_reason), token_ids, finish_reason, ended_by)
        texts = []
        # Push the tokens one by one, to know which token completes a stop string.
        for index, token_id in enumerate(shown):
            if self._num_unstopped > 0:
                self._num_unstopped -= 1
                texts.append(self._detokenizer.push([token_id]))
                continue
            text, hit = self._stop.push(self._detokenizer.push([token_id]))
            texts.append(text)
            if hit:
                matched = self._stop.matched
                return Piece("".join(texts), token_ids[: index + 1], "stop", matched)
        if finish_reason:
            text, hit = self._stop.push(self._rest(finish_reason))
            texts.append(text if hit else text + self._stop.flush())
            if hit:
                return Piece("".join(texts), token_ids, "stop", self._stop.matched)
        return Piece("".join(texts), token_ids, finish_reason, ended_by)

    def _rest(self, finish_reason: str) -> str:
        """Returns the text that the detokenizer has held back, if the completion ends here.

        If the bytes of the last character are incomplete, this character is left out.
        """
        return self._detokenizer.flush().rstrip("\ufffd") if finish_reason else ""


def text_stream(tokenizer: Tokenizer, answers: ModelFormat, request: PreparedRequest) -> TextStream:
    """Returns the stream that converts the tokens of one completion into text."""
    client = request.client
    sampling = client.sampling
    return TextStream(
        tokenizer,
        sampling.stop_strings,
        answer_parser(answers, client, request.token_ids),
        stop_token_ids=sampling.stop_token_ids or (),
        shows_stop=sampling.include_stop_str_in_output,
        skip_special_tokens=sampling.skip_special_tokens,
        min_tokens=sampling.min_tokens,
        prompt_text=_echoed(tokenizer, request) if client.echo else "",
    )


def _echoed(tokenizer: Tokenizer, request: PreparedRequest) -> str:
    """Returns the text that precedes the completion if the client requests an echo.

    A text prompt is returned as the client sent it. A truncated prompt, or a prompt of token ids,
    is decoded. For a chat, the final assistant message is returned.
    """
    prompt, sampling = request.client.prompt, request.client.sampling
    if isinstance(prompt, Conversation):
        final = prompt.messages[-1]
        return final.content or "" if final.role == "assistant" else ""
    if isinstance(prompt, str) and sampling.truncate_prompt_tokens is None:
        return prompt
    skips = sampling.skip_special_tokens and isinstance(prompt, str)
    return tokenizer.decode(request.token_ids, skip_special_tokens=skips)


def _joined(first: Piece, then: Piece) -> Piece:
    return replace(
        then,
        text=first.text + then.text,
        token_ids=first.token_ids + then.token_ids,
        reasoning=first.reasoning + then.reasoning,
        tool_calls=first.tool_calls + then.tool_calls,
    )


def _split(piece: Piece, parser: AnswerParser) -> Piece:
    parts = parser.finish(piece.text) if piece.finish_reason else parser.push(piece.text)
    finish_reason = piece.finish_reason
    if parser.is_done or finish_reason == "stop":
        finish_reason = parser.finish_reason
    return replace(
        piece,
        text=parts.content,
        reasoning=parts.reasoning,
        tool_calls=tuple(parts.calls),
        finish_reason=finish_reason,
        stop_reason=None if parser.is_done else piece.stop_reason,
    )

"""Turns a request's token ids into the text its client sees: detokenized, cut at a stop string, and
split into content, reasoning and tool calls.

It only finds where the text ends; the caller cancels the sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.models.detokenizer import IncrementalDetokenizer
from tandem.models.stop import StopStrings
from tandem.models.tokenizer import Tokenizer
from tandem.router.parsers.machine import CallDelta, Machine


@dataclass(frozen=True, slots=True)
class Piece:
    """Text with the tokens that count: up to the one that completed a stop string."""

    text: str
    token_ids: list[int]
    finish_reason: str
    reasoning: str = ""
    tool_calls: tuple[CallDelta, ...] = ()


class TextStream:
    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str], parser: Machine | None = None
    ) -> None:
        """`parser` splits the text; without one all of it is content."""
        # Clients see no special tokens, and parsers see those that they look for.
        shown = frozenset() if parser is None else tokenizer.special_ids(parser.terminals)
        self._detokenizer = IncrementalDetokenizer(tokenizer, shown=shown)
        self._parser = parser
        self._stop = StopStrings(stop) if stop else None

    def push(self, token_ids: list[int], finish_reason: str) -> Piece:
        """Returns the new text. A `finish_reason` releases all text that was held back.

        The token that ended a sequence with "stop" (an end-of-sequence token, or one of the
        client's stop ids) counts, and is not part of the text.
        """
        piece = self._push(token_ids, finish_reason)
        return piece if self._parser is None else _parsed(piece, self._parser)

    def _push(self, token_ids: list[int], finish_reason: str) -> Piece:
        shown = token_ids[:-1] if finish_reason == "stop" else token_ids
        if self._stop is None:
            text = self._detokenizer.push(shown)
            return Piece(text + self._rest(finish_reason), token_ids, finish_reason)
        texts = []
        # One by one, to know which token completed a stop string.
        for index, token_id in enumerate(shown):
            text, hit = self._stop.push(self._detokenizer.push([token_id]))
            texts.append(text)
            if hit:
                return Piece("".join(texts), token_ids[: index + 1], "stop")
        if finish_reason:
            text, hit = self._stop.push(self._rest(finish_reason))
            texts.append(text if hit else text + self._stop.flush())
            if hit:
                finish_reason = "stop"
        return Piece("".join(texts), token_ids, finish_reason)

    def _rest(self, finish_reason: str) -> str:
        """Returns what the detokenizer held back, less a character that the end cut in half."""
        return self._detokenizer.flush().rstrip("\ufffd") if finish_reason else ""


def _parsed(piece: Piece, parser: Machine) -> Piece:
    parts = parser.finish(piece.text) if piece.finish_reason else parser.push(piece.text)
    finish_reason = piece.finish_reason
    if parser.is_done or (finish_reason == "stop" and parser.num_calls):
        finish_reason = "tool_calls"
    return replace(
        piece,
        text=parts.content,
        reasoning=parts.reasoning,
        tool_calls=tuple(parts.calls),
        finish_reason=finish_reason,
    )

"""Turns a request's token ids into the text its client sees: detokenized, cut at a stop string.

It only finds where the text ends; the caller cancels the sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.models.detokenizer import IncrementalDetokenizer
from tandem.models.stop import StopStrings
from tandem.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """Text with the tokens that count: up to the one that completed a stop string."""

    text: str
    token_ids: list[int]
    finish_reason: str


class TextStream:
    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stop = StopStrings(stop) if stop else None

    def push(self, token_ids: list[int], finish_reason: str) -> Piece:
        """Returns the new text. A `finish_reason` releases all text that was held back.

        The token that ended a sequence with "stop" (an end-of-sequence token, or one of the
        client's stop ids) counts, and is not part of the text.
        """
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

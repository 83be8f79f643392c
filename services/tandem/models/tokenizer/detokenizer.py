"""Turns token ids into text as they come: whole characters only, nothing ever taken back.

A character may span tokens and a token may end inside one, so the bytes of an unfinished character
are held until it is whole, until it cannot become whole (then it is U+FFFD), or until `flush`. All
pieces in a row are what `Tokenizer.decode` makes of all ids at once. The cost of a token does not
depend on how many came before.
"""

import codecs
from collections.abc import Sequence

from tandem.models.tokenizer.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_PENDING_TOKENS_MAX = 4  # a character has at most 4 bytes, so no more tokens can be unfinished


class IncrementalDetokenizer:
    """Detokenizes one stream of tokens; start another for the next one."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """`shown` are special tokens that are text all the same."""
        self._is_special = tokenizer.is_special
        self._skip_special_tokens = skip_special_tokens
        self._shown = shown
        self._text: _PieceText | _WindowText = (
            _PieceText(tokenizer) if tokenizer.is_byte_level else _WindowText(tokenizer)
        )

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that these tokens complete; may be empty."""
        if self._skip_special_tokens:
            token_ids = [i for i in token_ids if i in self._shown or not self._is_special(i)]
        return self._text.push(token_ids)

    def flush(self) -> str:
        """Returns what is held at the stream's end: U+FFFD for a cut character, or nothing."""
        return self._text.flush()


class _PieceText:
    """Text of byte-level tokenizers: their tokens' bytes in a row, so UTF-8 is all there is."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._piece = tokenizer.piece
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self._piece, token_ids)))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowText:
    """Text of other tokenizers (SentencePiece's): tokens mean something only beside one another.

    Decodes a window of a few ids: those that made the text emitted last, as the context that
    decides about spaces, then the pending ones. New text is what the window says beyond its
    context:

        ... emitted before | context | pending
                           '-------- window --'

    Such a decoder makes U+FFFD of every byte in a row of byte tokens when one of them is invalid.
    Bytes before that one that made whole characters were emitted as such; there, and only there,
    the stream says more than `decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._window: list[int] = []
        self._num_context = 0
        self._context_text = ""

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._push_one, token_ids))

    def flush(self) -> str:
        return self._advance(self._window_text())

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._window_text()
        if len(self._window) == 1 and not text:
            self._num_context = 1  # the space at the start of a stream, which has no text
            return ""
        num_pending = len(self._window) - self._num_context
        unfinished = text.endswith(_REPLACEMENT) or len(text) <= len(self._context_text)
        if unfinished and num_pending < _PENDING_TOKENS_MAX:
            return ""
        return self._advance(text)

    def _advance(self, text: str) -> str:
        new_text = text[len(self._context_text) :]
        if new_text:
            self._window = self._window[self._num_context :]
            self._context_text = self._window_text()
        else:
            # Tokens without a text of their own (unknown ids): no context either.
            self._window = self._window[: self._num_context]
        self._num_context = len(self._window)
        return new_text

    def _window_text(self) -> str:
        return self._decode(self._window, skip_special_tokens=False)

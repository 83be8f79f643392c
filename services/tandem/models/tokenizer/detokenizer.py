"""Converts a stream of token ids to text incrementally, in complete characters.

A character may span several tokens. The bytes of an incomplete character are held back until the
character is complete. Invalid bytes, and incomplete bytes at `flush`, become U+FFFD. The
concatenated output equals `Tokenizer.decode` of all ids, with one exception (see `_WindowText`).
The cost per token is constant.
"""

import codecs
from collections.abc import Sequence

from tandem.models.tokenizer.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_PENDING_TOKENS_MAX = 4  # A character has at most 4 bytes, so it spans at most 4 tokens.


class IncrementalDetokenizer:
    """Detokenizes one stream of tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """`shown` are ids of special tokens that `skip_special_tokens` does not remove."""
        self._is_special = tokenizer.is_special
        self._skip_special_tokens = skip_special_tokens
        self._shown = shown
        self._text: _PieceText | _WindowText = (
            _PieceText(tokenizer) if tokenizer.is_byte_level else _WindowText(tokenizer)
        )

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds tokens, and returns the text that is now complete, which may be ""."""
        if self._skip_special_tokens:
            token_ids = [i for i in token_ids if i in self._shown or not self._is_special(i)]
        return self._text.push(token_ids)

    def flush(self) -> str:
        """Ends the stream, and returns the rest: U+FFFD for an incomplete character, else ""."""
        return self._text.flush()


class _PieceText:
    """Text of byte-level tokenizers: the concatenated bytes of the tokens, decoded as UTF-8."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._piece = tokenizer.piece
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self._piece, token_ids)))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowText:
    """Text of other tokenizers (SentencePiece), in which a token's text depends on its neighbours.

    The class decodes a window of a few token ids. The first ids of the window are the context: the
    ids of the text that was emitted last. The other ids are pending. The new text is the text of
    the window after the text of the context. For example, if the context is "Hello" and the window
    decodes to "Hello world", the new text is " world". Without the context it would be "world",
    because the decoder drops the space of a text's first token.

        ids:  ... emitted before | context | pending
                                 '-------- window --'

    The stream differs from `decode` of all ids in one case: consecutive byte tokens of which one is
    invalid. `decode` replaces every byte of such a run by U+FFFD. The stream has already emitted
    the complete characters before the invalid byte.
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
            # A first token without text is a space, which the decoder drops at the start of a text.
            # It becomes the context.
            self._num_context = 1
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
            # Tokens without text, such as unknown ids, do not become context.
            self._window = self._window[: self._num_context]
        self._num_context = len(self._window)
        return new_text

    def _window_text(self) -> str:
        return self._decode(self._window, skip_special_tokens=False)

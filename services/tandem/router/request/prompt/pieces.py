"""Cuts very long texts into pieces, so that less text must be tokenized. There are two uses.

Counting: A prompt that cannot fit into the context is refused before the whole prompt is tokenized.
Pieces are tokenized separately, one after another. A word at a cut may be split, so the pieces
together may have slightly more tokens than the text. `CUT_TOKENS` is far more than one cut can add.
Example: three pieces have 8,000 tokens each. The text certainly has at least
3 * (8,000 - CUT_TOKENS) = 23,616 tokens. As soon as this number exceeds the context length, the
prompt is refused.

Truncation: If only the last tokens of a prompt are needed, pieces are tokenized from the end until
there are enough tokens. The ids must equal those of the whole text, so each piece is tokenized
together with `CONTEXT_CHARACTERS` characters of text before and after the piece:
    text:   ...------------------|- context -|---- piece ---|- context -|---...
                                             start          stop
`find_cut` finds `start` and `stop`. Each is a place between a letter or digit and a space or line
break, such that no token of the vocabulary contains these two characters in sequence. So the
tokenizer always begins a new token there.
"""

import re
from collections.abc import Iterator, Set

PIECE_CHARACTERS = 32_000  # characters of a piece, which take about 40 ms to tokenize
CUT_TOKENS = 128  # more tokens than one cut between pieces can add
# The tokens of a text are not counted in advance if the text has at most 4 characters for each
# token of the context. Such a text probably fits, and counting would tokenize the text twice.
CHARACTERS_PER_TOKEN = 4
# A piece is tokenized together with this many characters before and after the piece. No token is
# this long, and no token's beginning or end depends on text this far away.
CONTEXT_CHARACTERS = 512
_LETTER_BEFORE_SPACE = re.compile(r"[^\W_](?=[ \n])")


def is_counted_first(num_characters: int, max_model_len: int) -> bool:
    """Returns whether a text is so long that its tokens are counted before it is tokenized."""
    return num_characters > max(PIECE_CHARACTERS, CHARACTERS_PER_TOKEN * max_model_len)


def cut(text: str) -> Iterator[str]:
    """Yields the pieces of `text` in order, at most `PIECE_CHARACTERS` characters each.

    If the last quarter of a piece has spaces or line breaks, the piece ends before the last of
    them.
    """
    start = 0
    while start < len(text):
        end = start + PIECE_CHARACTERS
        if end < len(text):
            from_ = end - PIECE_CHARACTERS // 4
            found = max(text.rfind(" ", from_, end), text.rfind("\n", from_, end))
            end = found if found > 0 else end
        yield text[start:end]
        start = end


def find_cut(text: str, stop: int, joined: Set[bytes]) -> int | None:
    """Returns the index where a piece that ends at `stop` may begin.

    The piece has about PIECE_CHARACTERS characters. Returns None if there is no place to cut near
    that length. `joined` has all two-byte strings that end with a space or line break and occur in
    a token of the vocabulary, such as b": ". There must be no cut within such a string.
    """
    if stop <= 2 * PIECE_CHARACTERS:
        return 0
    target = stop - PIECE_CHARACTERS
    for first, last in (
        (target, stop - PIECE_CHARACTERS // 2),
        (target - PIECE_CHARACTERS, target),
    ):
        for found in _LETTER_BEFORE_SPACE.finditer(text, first, last):
            end = found.end()
            if (text[end - 1].encode()[-1:] + text[end].encode()) not in joined:
                return end
    return None


def at_least(num_tokens: int, num_pieces: int) -> int:
    """Returns a number of tokens that a text certainly has.

    `num_tokens` is the sum over the first `num_pieces` pieces of the text, tokenized separately.
    """
    return num_tokens - CUT_TOKENS * num_pieces

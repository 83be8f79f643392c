"""Cuts very long texts into pieces, so that less text must be tokenized. There are two uses.

Counting: A prompt that cannot fit into the context is refused before all of it is tokenized. Pieces
are tokenized one after another, each alone. A word at a cut may be split, so the pieces together
may have some more tokens than the text. `CUT_TOKENS` is far above this increase at one cut. So if
three pieces have n1, n2 and n3 tokens, the text certainly has at least this number of tokens:
    (n1 - CUT_TOKENS) + (n2 - CUT_TOKENS) + (n3 - CUT_TOKENS)
As soon as that number exceeds the context, the prompt is refused.

Truncation: If only the last tokens of a prompt are needed, pieces are tokenized from the end until
there are enough tokens. The ids must equal those of the whole text, so each piece is tokenized with
`CONTEXT_CHARACTERS` of text before and after it:
    text:   ...------------------|- context -|---- piece ---|- context -|---...
                                             start          stop
`start` and `stop` are cuts that `find_cut` returns. Such a cut is after a letter or digit and
before a space or line break, and no token of the vocabulary contains these two characters in
sequence. So every tokenizer begins a token at the cut.
"""

import re
from collections.abc import Iterator, Set

PIECE_CHARACTERS = 32_000  # length of a piece, which takes about 40 ms to tokenize
CUT_TOKENS = 128
# A text with at most this many characters for each token of the context is not counted first. Such
# a text probably fits, and it would be tokenized twice if it were counted.
CHARACTERS_PER_TOKEN = 4
# A piece is tokenized together with this many characters before and after the piece. They are more
# than the longest token, and more than the surrounding text on which a token can depend.
CONTEXT_CHARACTERS = 512
_LETTER_BEFORE_SPACE = re.compile(r"[^\W_](?=[ \n])")


def is_counted_first(num_characters: int, max_model_len: int) -> bool:
    """Returns whether a text is so long that its tokens are counted before it is tokenized."""
    return num_characters > max(PIECE_CHARACTERS, CHARACTERS_PER_TOKEN * max_model_len)


def cut(text: str) -> Iterator[str]:
    """Yields the pieces of `text` in order, at most `PIECE_CHARACTERS` each.

    A cut is before a space or line break if the last quarter of the piece has one.
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

    The piece has about PIECE_CHARACTERS. Returns None if there is no place to cut near that length.
    `joined` has all two-byte strings (a byte and a space or line break) that occur in a token of
    the vocabulary, where no cut is possible.
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

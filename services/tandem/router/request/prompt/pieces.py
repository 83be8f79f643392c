"""Cuts long texts into pieces, to count tokens early and to tokenize only the end.

Counting: each piece is tokenized alone. If the pieces have n1, n2, ... tokens, the text has at
least (n1 - CUT_TOKENS) + (n2 - CUT_TOKENS) + ... tokens.
    text:   |---- piece ----|---- piece ----|---- piece ----|-- piece --|
                   n1              n2              n3             n4
A cut changes only tokens close to it: a merge, a word, a special token or a normalized character
that spans the cut becomes more tokens. `CUT_TOKENS` is far above this increase, so a text that fits
into the context is never refused.

Truncation: a prompt that is truncated to its last tokens is tokenized from its end, piece by piece.
Each piece is tokenized together with CONTEXT_CHARACTERS before and after it.
    text:   ...------------------|- context -|---- piece ---|- context -|---...
                                             start          stop
The pieces begin and end only at cuts that `find_cut` returns. Such a cut is after a letter or digit
and before a space or line break, and no token of the vocabulary contains these two characters in
sequence. So every tokenizer begins a token at the cut, and the ids equal those of the whole text.
"""

import re
from collections.abc import Iterator, Set

PIECE_CHARACTERS = 32_000  # length of a piece, which takes about 40 ms to tokenize
CUT_TOKENS = 128
# Text in most languages has fewer characters per token. A text with fewer than this many characters
# for each token of the context may fit. It is not counted first, because counting it would tokenize
# it twice.
CHARACTERS_PER_TOKEN = 4
# Length of the context before and after a piece. The context is longer than any token and than the
# text around a token on which that token can depend.
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

    The piece has about PIECE_CHARACTERS. Returns None if there is no cut near its beginning.
    `joined` has the pairs of a byte and a following space or line break that occur inside a token.
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
    """Returns the minimum number of tokens of a text.

    The first `num_pieces` pieces of the text, tokenized separately, have `num_tokens` tokens.
    """
    return num_tokens - CUT_TOKENS * num_pieces

"""Cuts long texts into pieces, to count their tokens early and to tokenize only their end. Pure.

    text:   |---- piece ----|---- piece ----|---- piece ----|-- piece --|
    count:  n1 - CUT_TOKENS + n2 - CUT_TOKENS + ...   is at most the number of tokens of the text

A cut changes tokens on both sides of it, and only near it: a merge, a word, a special token or a
normalized character that spans the cut becomes more tokens than it was. `CUT_TOKENS` is far above
what such a place can add, so a text that fits is never refused.

    text:   ...------------------|- context -|---- part ----|- context -|---...
                                             start          stop

The ids of a prompt come from pieces only if the prompt is truncated to its last tokens. Then each
part is tokenized within its context, and only where `find_cut` finds a place at which every
tokenizer begins a token, wherever the text before it begins: after a letter or digit, before a
space or line break, if no token of the vocabulary has such a pair inside. So the ids are those of
the whole text.
"""

import re
from collections.abc import Iterator, Set

PIECE_CHARACTERS = 32_000  # about 40 ms of work
CUT_TOKENS = 128
# Text in most languages has fewer characters a token: what is shorter may well fit, and is not
# tokenized twice.
CHARACTERS_PER_TOKEN = 4
CONTEXT_CHARACTERS = 512  # on both sides of a part: more than any token, or what decides on it
_LETTER_BEFORE_SPACE = re.compile(r"[^\W_](?=[ \n])")


def is_counted_first(num_characters: int, max_model_len: int) -> bool:
    """Returns whether a text is so long that it is counted before it is tokenized as a whole."""
    return num_characters > max(PIECE_CHARACTERS, CHARACTERS_PER_TOKEN * max_model_len)


def cut(text: str) -> Iterator[str]:
    """Yields the pieces of `text` in order, at most `PIECE_CHARACTERS` each.

    A cut is before a space or line break if the last quarter of a piece has one.
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
    """Returns where the part that ends at `stop` may begin, about a piece before; None if there is
    no such place nearby. `joined` has the pairs of bytes that some token has inside."""
    if stop <= 2 * PIECE_CHARACTERS:
        return 0
    near = stop - PIECE_CHARACTERS
    for first, last in ((near, stop - PIECE_CHARACTERS // 2), (near - PIECE_CHARACTERS, near)):
        for found in _LETTER_BEFORE_SPACE.finditer(text, first, last):
            end = found.end()
            if (text[end - 1].encode()[-1:] + text[end].encode()) not in joined:
                return end
    return None


def at_least(num_tokens: int, num_pieces: int) -> int:
    """Returns how many tokens a text certainly has whose first pieces have `num_tokens`."""
    return num_tokens - CUT_TOKENS * num_pieces

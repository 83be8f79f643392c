"""Counts the tokens of a long text piece by piece, to refuse it early. Pure.

    text:   |---- piece ----|---- piece ----|---- piece ----|-- piece --|
    count:  n1 - CUT_TOKENS + n2 - CUT_TOKENS + ...   is at most the number of tokens of the text

A cut changes tokens on both sides of it, and only near it: a merge, a word, a special token or a
normalized character that spans the cut becomes more tokens than it was. `CUT_TOKENS` is far above
what such a place can add, so a text that fits is never refused. The ids of a prompt never come from
pieces.
"""

from collections.abc import Iterator

PIECE_CHARACTERS = 32_000  # about 40 ms of work
CUT_TOKENS = 128
# Text in most languages has fewer characters a token: what is shorter may well fit, and is not
# tokenized twice.
CHARACTERS_PER_TOKEN = 4


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


def at_least(num_tokens: int, num_pieces: int) -> int:
    """Returns how many tokens a text certainly has whose first pieces have `num_tokens`."""
    return num_tokens - CUT_TOKENS * num_pieces

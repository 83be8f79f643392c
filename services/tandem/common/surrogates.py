"""Repairs JSON texts with half of a surrogate pair.

Programs in JavaScript write such a half, such as `\\ud83d`, where they cut a text in the middle of
a character. RFC 8259 allows the escape, and says that parsers differ. A half is no character.
"""

import re
from typing import Any

import msgspec

_HEX = "[0-9a-fA-F]"
# A surrogate after an odd number of backslashes. Group 1: the other backslashes. Group 2: a pair.
_SURROGATE = re.compile(
    rf"(?<!\\)((?:\\\\)*)\\(?:(u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}})"
    rf"|u[dD][89a-fA-F]{_HEX}{{2}})"
)


def without_halves(text: str) -> str:
    """Returns a JSON text with the escape of U+FFFD in place of each half of a surrogate pair."""
    return _SURROGATE.sub(lambda found: found[0] if found[2] else f"{found[1]}\\ufffd", text)


def decode_json(text: str) -> Any:
    """Parses a JSON text, in which halves of surrogate pairs become U+FFFD. Raises
    msgspec.DecodeError and RecursionError."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        # Repairing takes longer than parsing, and almost no text needs it.
        if (repaired := without_halves(text)) == text:
            raise
        return msgspec.json.decode(repaired)

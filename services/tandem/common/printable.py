"""Makes untrusted text safe to show in a log line, on a terminal or in a table. Does no I/O.

Some characters end a line, move a terminal's cursor, change its title or reorder the text beside
them: control characters (C0 and C1), U+2028 and U+2029, bidi overrides and other invisible
characters, lone surrogates. They are escaped as by Python's `repr`, such as `\\x1b`.
"""

import math
from typing import Any


def printable(text: str, *, keep: str = "") -> str:
    """Returns the text with unprintable characters escaped, except those in `keep`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def printable_json(value: Any, *, keep: str = "") -> Any:
    """Returns a parsed JSON value whose strings, keys included, are printable."""
    if isinstance(value, str):
        return printable(value, keep=keep)
    if isinstance(value, list):
        return [printable_json(each, keep=keep) for each in value]
    if isinstance(value, dict):
        return {printable(name): printable_json(each, keep=keep) for name, each in value.items()}
    return value


def shorten(value: object) -> str:
    """Formats a value for a message: at most 80 characters, in quotes if it is a text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = str(value) if isinstance(value, int | float) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

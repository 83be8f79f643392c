"""Finds the strings that separate the parts of an answer, in text that arrives in pieces."""

from collections.abc import Mapping


def split(terminals: Mapping[str, str], text: str, *, final: bool) -> tuple[str, str]:
    """Returns the text before the first terminal, and that terminal if it is complete.

    Text that may be the beginning of a terminal is in neither, unless the text is `final`.
    """
    if not any(t[0] in text for t in terminals):  # true for most pieces of an answer
        return text, ""
    end = min((at for t in terminals if (at := text.find(t)) >= 0), default=len(text))
    if not final:
        longest = max(map(len, terminals), default=1)
        for at in range(max(0, len(text) - longest + 1), end):
            if any(t.startswith(text[at:]) for t in terminals):
                return text[:at], ""
    return text[:end], next((t for t in terminals if text.startswith(t, end)), "")

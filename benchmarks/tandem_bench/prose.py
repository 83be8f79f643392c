"""English prose for measurements of quality, without a download: Python's own manual.

`pydoc_data.topics` is the language reference that every Python installs, under the PSF licence.
Grammars, tables and code are left out. The text differs a little between versions of Python.
"""

from __future__ import annotations

import re
from pydoc_data.topics import topics

_LETTERS_MIN = 60  # shorter paragraphs are headings and items of lists


def english_prose() -> str:
    """Returns the paragraphs of the manual that are prose, each once, in the manual's order."""
    paragraphs: dict[str, None] = {}
    for topic in topics.values():
        for paragraph in re.split(r"\n\s*\n", topic):
            paragraphs[" ".join(paragraph.split())] = None
    return "\n\n".join(filter(_is_prose, paragraphs))


def _is_prose(paragraph: str) -> bool:
    return (
        len(paragraph) > _LETTERS_MIN
        and bool(re.match(r'[A-Z"*]', paragraph))
        and paragraph.endswith((".", ":"))
        and not any(mark in paragraph for mark in ("::=", ">>>"))
    )

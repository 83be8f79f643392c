"""Parses tool calls that models write as calls of functions, and converts their arguments to JSON.

    PYTHON    find(q='x', tags=['a'], deep=True)
    GEMMA     call:find{q:<|"|>x<|"|>,tags:[<|"|>a<|"|>],deep:true}

Both become the call of `find` with the arguments {"q": "x", "tags": ["a"], "deep": true}. The
parser takes one character at a time, so the result does not depend on how the text is cut into
pieces.
"""

import json
import math
import re
import sys
from dataclasses import dataclass

from tandem.router.parsers.json_text import DEPTH_MAX, SCALAR, SPACE, Call, escaped

_NAME = re.compile(r"[\w.-]{1,256}")
_WORD_CHARACTERS_MAX = 512
_CLOSES = {"(": ")", "[": "]", "{": "}"}
_LITERALS = {"True": "true", "False": "false", "None": "null", "none": "null"}
# The character after a backslash in a Python string -> JSON.
_ESCAPES = {**{c: f"\\{c}" for c in 'ntrbf"\\/'}, "'": "'", "\n": ""}
_HEX_DIGITS = {
    "x": 2,
    "u": 4,
    "U": 8,
}  # the character after a backslash -> number of hex digits after it


@dataclass(frozen=True, slots=True)
class Notation:
    """How a model writes a call: `prefix`, the name, `opens`, pairs such as `q='x'`, `closes`."""

    opens: str
    equals: str  # between the name and the value of an argument
    quotes: tuple[str, ...]  # strings that begin and end a string
    prefix: str = ""
    has_escapes: bool = False  # True: strings have escapes such as \\n

    @property
    def closes(self) -> str:
        return _CLOSES[self.opens]

    def begins_with(self, char: str) -> bool:
        """Returns whether a call may begin with this character."""
        return char == self.prefix[0] if self.prefix else char.isalpha() or char == "_"


PYTHON = Notation("(", "=", ("'", '"'), has_escapes=True)
GEMMA = Notation("{", ":", ('<|"|>',), prefix="call:")


class LiteralCall:
    """Parses one call in a notation. It has the attributes of `json_text.CallText`.

    Value of `_expects`    What may come next in the text
    "name"                 the name of the function, up to the bracket that opens the arguments
    "key", "first key"     the name of an argument, or a key of an object; a first key may be absent
    "value"                a value
    "first value",         a value of an array, or the bracket that closes the array
    "next value"
    "after"                after a value: "," or the bracket that closes the array or object
    "end"                  nothing, because the call is complete
    """

    whole: Call | None = None  # the arguments are always streamed

    def __init__(self, notation: Notation) -> None:
        self._notation = notation
        self._expects = "name"
        self._open: list[str] = []  # brackets that are open
        self._word = ""  # text so far of a name, a key or a value without quotes
        self._key_is_quoted = False
        self._quote = ""  # quote that ends the current string; "" outside strings
        self._is_key = False  # True: the current string is a key
        self._mark = ""  # text that may be the beginning of a quote
        # A quote, and space after it, that may end a string. In Python the string goes on if
        # neither a comma nor a bracket follows, as in 'it's': models leave out the backslash.
        self._ending = ""
        self._escape = ""  # an incomplete escape, such as "\\u00"
        self.name = ""
        self.is_streaming = False
        self.is_broken = False

    @property
    def has_ended(self) -> bool:
        return self._expects == "end"

    @property
    def held(self) -> str:
        """The text that was taken and is not yet in the JSON of the arguments."""
        return self._word + self._mark + self._ending + self._escape

    def push(self, char: str) -> str:
        """Takes a character; returns the text that it adds to the JSON of the arguments."""
        added = self._push(char)
        if added is None:
            self.is_broken = True
            return ""
        self.is_streaming = self.is_streaming or bool(added)
        return added

    def _push(self, char: str) -> str | None:
        if self._quote:
            return self._push_in_string(char)
        if self._mark:
            return self._push_in_mark(char)
        if self._expects == "name":
            return self._push_in_name(char)
        if self._expects.endswith("key"):
            return self._push_in_key(char)
        if char in ",)]}":
            return self._push_end(char)
        if char in SPACE and not self._word:
            return ""
        if self._expects == "after":
            return None
        if not self._word and self._begins_quote(char):
            return self._push_in_mark(char)
        if not self._word and char in _CLOSES:
            added = self._separator + ("{" if char == "{" else "[")
            self._open.append(char)
            self._expects = "first key" if char == "{" else "first value"
            return added if len(self._open) <= DEPTH_MAX else None
        if char in "([{'\"" or len(self._word) == _WORD_CHARACTERS_MAX:
            return None
        self._word += char
        return ""

    def _begins_quote(self, char: str) -> bool:
        return any(quote.startswith(char) for quote in self._notation.quotes)

    def _push_in_name(self, char: str) -> str | None:
        notation = self._notation
        self._word += char
        name = self._word.removeprefix(notation.prefix)
        if char == notation.opens and _NAME.fullmatch(name[:-1]):
            self.name = name[:-1]
            self._word = ""
            self._open.append(char)
            self._expects = "first key"
            return ""
        if notation.prefix.startswith(self._word) or _NAME.fullmatch(name):
            return ""
        return None

    def _push_in_key(self, char: str) -> str | None:
        is_outer = len(self._open) == 1
        if char == (self._notation.equals if is_outer else ":") and (
            self._word or self._key_is_quoted
        ):
            is_first = self._expects == "first key"
            before = ", " if not is_first else "{" if is_outer else ""
            added = f'{before}"{self._word.rstrip()}": '
            self._word = ""
            self._key_is_quoted = False
            self._expects = "value"
            return added
        if char == _CLOSES[self._open[-1]] and not (self._word or self._key_is_quoted):
            return self._close("{}" if is_outer and self._expects == "first key" else "}")
        if char in SPACE:
            if self._word:  # only the end of the word may follow
                self._word += char
            return "" if len(self._word) <= _WORD_CHARACTERS_MAX else None
        if self._key_is_quoted:
            return None
        if not self._word and self._begins_quote(char):
            self._is_key = True
            return self._push_in_mark(char)
        if not _NAME.fullmatch(self._word + char):
            return None
        self._word += char
        return ""

    def _push_end(self, char: str) -> str | None:
        """Takes a comma or a closing bracket, which ends a value."""
        is_object = self._open[-1] == "{" or len(self._open) == 1
        text = ""
        if self._word:
            text = self._separator + _json_of(self._word.strip())
            self._word = ""
        elif self._expects == "value" or (self._expects != "after" and char == ","):
            return None
        if char == ",":
            self._expects = "key" if is_object else "next value"
            return text
        if char != _CLOSES[self._open[-1]]:
            return None
        return text + self._close("}" if is_object else "]")

    def _close(self, text: str) -> str:
        self._open.pop()
        self._expects = "after" if self._open else "end"
        return text

    @property
    def _separator(self) -> str:
        """The JSON before the value that begins."""
        return ", " if self._expects == "next value" else ""

    def _push_in_mark(self, char: str) -> str | None:
        """Takes a character of a quote that may begin a string."""
        mark = self._mark + char
        fits = [quote for quote in self._notation.quotes if quote.startswith(mark)]
        if not fits:
            return None
        self._mark = mark
        if fits[0] != mark:
            return ""
        self._mark = ""
        self._quote = fits[0]
        return "" if self._is_key else f'{self._separator}"'

    def _push_in_string(self, char: str) -> str | None:
        if self._ending:
            return self._push_after_string(char)
        if self._escape:
            return self._push_in_escape(char)
        self._mark += char
        if self._mark == self._quote:
            self._mark = ""
            if self._notation.has_escapes:
                self._ending = self._quote
                return ""
            return self._end_string()
        held = ""
        while self._mark and not self._quote.startswith(self._mark):
            held += self._mark[0]
            self._mark = self._mark[1:]
        if held == "\\" and self._notation.has_escapes:
            self._escape = held
            return ""
        return self._in_string(escaped(held))

    def _in_string(self, text: str) -> str:
        """Takes a part of a string, as JSON. Returns what it adds to the arguments."""
        if not self._is_key:
            return text
        self._word += text
        return ""

    def _push_after_string(self, char: str) -> str | None:
        if char in SPACE:
            self._ending += char
            return ""
        ending = self._ending
        self._ending = ""
        if char in (":" if self._is_key else ",)]}"):
            added = self._end_string()
            more = self._push(char)
            return None if more is None else added + more
        text = self._in_string(escaped(ending))
        more = self._push_in_string(char)
        return None if more is None else text + more

    def _end_string(self) -> str:
        self._quote = ""
        if self._is_key:
            self._is_key = False
            self._key_is_quoted = True
            return ""
        self._expects = "after"
        return '"'

    def _push_in_escape(self, char: str) -> str | None:
        escape = self._escape + char
        self._escape = ""
        kind = escape[1]
        if kind not in _HEX_DIGITS:
            return self._in_string(_ESCAPES.get(kind, escaped(escape)))
        if len(escape) > 2 and char not in "0123456789abcdefABCDEF":
            more = self._push_in_string(char)
            return None if more is None else self._in_string(escaped(escape[:-1])) + more
        if len(escape) == 2 + _HEX_DIGITS[kind]:
            return self._in_string(_unescaped(escape))
        self._escape = escape
        return ""


def _unescaped(escape: str) -> str:
    """Returns the JSON of an escape such as "\\x41" or "\\U0001f600"."""
    code = int(escape[2:], 16)
    if code < 1 << 16:
        return f"\\u{code:04x}"
    return escaped(chr(code) if code <= sys.maxunicode else escape)


def _json_of(word: str) -> str:
    """Returns the JSON of a value without quotes: a number, true, false, null or else a string."""
    word = _LITERALS.get(word, word)
    if SCALAR.fullmatch(word):
        return word
    for number in (int, float):
        try:
            value = number(word)
        except ValueError:
            continue
        if math.isfinite(value):
            return json.dumps(value)
    return f'"{escaped(word)}"'

"""Parses JSON one character at a time, as a model writes it.

`JsonText` checks that a text is JSON, and finds where the JSON ends. `CallText` parses one call,
`{"name": ..., "arguments": {...}}`, and returns the arguments while they are written. Both take one
character at a time, so the result does not depend on how the text is cut into pieces.
"""

import json
import re
from typing import Any, NamedTuple

SPACE = " \t\r\n"
DEPTH_MAX = 128
SCALAR = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?|true|false|null")
_SCALAR_CHARACTERS_MAX = 512
_NAME_KEYS = ("name", "tool_name")
_CLOSES = {"}": "{", "]": "["}


class JsonText:
    """Checks that a text is one JSON value.

    Value of `expects`    What may come next in the text
    "value"               a value
    "value or ]"          a value or "]", at the start of an array
    "key"                 a key
    "key or }"            a key or "}", at the start of an object
    ":"                   the colon after a key
    "after"               after an element: "," or the bracket that closes the array or object
    "end"                 only white space, because the outermost value is complete
    """

    def __init__(self) -> None:
        self.expects = "value"
        self.in_string = False
        self._open: list[str] = []
        self._is_key = False
        # State of an escape in a string. -1: the last character was a backslash. 1 to 4: this many
        # hex digits of a \u escape must still follow. 0: no escape.
        self._escape = 0
        self._scalar = ""

    @property
    def depth(self) -> int:
        return len(self._open)

    def push(self, char: str) -> bool:
        """Takes a character; returns False if the text is not JSON."""
        if self.in_string:
            return self._push_in_string(char)
        if self._scalar:
            if char not in SPACE + ",]}":
                self._scalar += char
                return len(self._scalar) <= _SCALAR_CHARACTERS_MAX
            if not SCALAR.fullmatch(self._scalar):
                return False
            self._scalar = ""
            self._end_value()
        return char in SPACE or self._push_mark(char)

    def _push_mark(self, char: str) -> bool:
        expects = self.expects
        if char == '"' and expects in ("value", "value or ]", "key", "key or }"):
            self.in_string = True
            self._is_key = expects.startswith("key")
        elif char in "{[" and expects in ("value", "value or ]"):
            self._open.append(char)
            self.expects = "key or }" if char == "{" else "value or ]"
            return len(self._open) <= DEPTH_MAX
        elif char in "}]" and self._may_close(char):
            self._open.pop()
            self._end_value()
        elif char == ":" and expects == ":":
            self.expects = "value"
        elif char == "," and expects == "after":
            self.expects = "key" if self._open[-1] == "{" else "value"
        elif expects in ("value", "value or ]") and (char.isalnum() or char == "-"):
            self._scalar = char
        else:
            return False
        return True

    def _may_close(self, char: str) -> bool:
        is_own = bool(self._open) and self._open[-1] == _CLOSES[char]
        return is_own and (self.expects == "after" or self.expects.endswith(char))

    def _push_in_string(self, char: str) -> bool:
        if self._escape == 0:
            if char == "\\":
                self._escape = -1
            elif char == '"':
                self.in_string = False
                if self._is_key:
                    self.expects = ":"
                else:
                    self._end_value()
            return True
        if self._escape == -1:
            self._escape = 4 if char == "u" else 0
            return char in '"\\/bfnrtu'
        self._escape -= 1
        return char in "0123456789abcdefABCDEF"

    def _end_value(self) -> None:
        self.expects = "after" if self._open else "end"


def escaped(text: str) -> str:
    """Returns `text` as it is written inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class Call(NamedTuple):
    """A complete tool call."""

    name: str
    arguments: str


class CallText:
    """Parses one call, a JSON object such as {"name": "find", "arguments": {"q": "x"}}.

    If the name comes before the arguments, `push` returns the arguments' text as it is written, and
    `is_streaming` is True within the arguments. If the arguments come before the name, `push`
    returns nothing, and `whole` has the call when the object has ended.
    """

    held = ""  # all text of arguments is returned at once

    def __init__(self) -> None:
        self._json = JsonText()
        self._text = ""
        self._key = ""
        self._string_start = 0
        self._has_streamed = False
        self.name = ""
        self.is_streaming = False
        self.is_broken = False  # True: the text is not a call
        self.whole: Call | None = None

    @property
    def has_ended(self) -> bool:
        return self._json.expects == "end"

    def push(self, char: str) -> str:
        """Takes a character; returns the text that it adds to the arguments."""
        parser = self._json
        expects = parser.expects
        depth = parser.depth
        was_in_string = parser.in_string
        if not parser.push(char):
            self.is_broken = True
        elif self.is_streaming:
            self.is_streaming = parser.depth > 1
            return in_json(char, in_string=was_in_string)
        elif not self._has_streamed:
            self._text += char
            if depth == 1:
                self._note(char, expects, was_in_string=was_in_string)
            if self.is_streaming:
                return char
            if self.has_ended:
                self.whole = as_call(loaded(self._text))
                self.is_broken = self.whole is None
        return ""

    def _note(self, char: str, expects: str, *, was_in_string: bool) -> None:
        """Records the function's name, and starts streaming where the arguments begin."""
        if was_in_string and not self._json.in_string:
            text = loaded(self._text[self._string_start :])
            if self._json.expects == ":":
                self._key = text
            elif self._key in _NAME_KEYS:
                self.name = text
        elif not was_in_string and char == '"':
            self._string_start = len(self._text) - 1
        elif char == "{" and not was_in_string and expects == "value" and self.name:
            self.is_streaming = self._has_streamed = self._key in ("arguments", "parameters")


def in_json(char: str, *, in_string: bool) -> str:
    """Returns the character, escaped if it is a control character in a JSON string.

    Models write line breaks into strings without escaping them, which is not valid JSON.
    """
    return escaped(char) if in_string and char < " " else char


def loaded(text: str) -> Any:
    """Returns the value of a JSON text, or None if it is not JSON."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def as_call(value: Any) -> Call | None:
    """Returns the call that a JSON value describes; None if it describes no call.

    Accepted forms: {"name": "find", "arguments": {...}}, the same with the keys `tool_name` or
    `parameters`, and {"function": {...}} around one of these.
    """
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        return None
    name = next((value[key] for key in _NAME_KEYS if value.get(key)), None)
    if not isinstance(name, str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = loaded(arguments)
        if not isinstance(arguments, dict):
            return None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return None
    return Call(name, json.dumps(arguments, ensure_ascii=False))

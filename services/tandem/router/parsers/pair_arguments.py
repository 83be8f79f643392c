"""Builds the JSON of a call's arguments from parameters that a model writes as tags.

For example, <parameter=city>Rome</parameter> becomes {"city": "Rome"}. The tags do not show the
type of a value, so the types come from the function's schema. A string value is returned while the
model writes the string. Any other value is returned once the value is complete.
"""

import ast
import json
import warnings
from collections.abc import Mapping
from typing import Any

from tandem.router.parsers.json_text import escaped, loaded

_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}
# Longest value that is parsed as a Python literal, such as {'a': True}. Parsing takes up to 10 ms.
# A longer value is treated as text.
_LITERAL_CHARACTERS_MAX = 1 << 13
_TYPE_NAMES: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    dict: ("object",),
    list: ("array",),
    type(None): ("null",),
}


class PairArguments:
    """Writes the JSON of one call's arguments. Each method returns the next piece of the JSON.

    The caller calls `begin_value`, `push` and `end_value` for each parameter, and then `end`.
    Example: the pieces `{"city": "`, `Rome`, `"` and `}` of the JSON `{"city": "Rome"}`.
    """

    def __init__(self, schema: Mapping[str, Any] | None, *, trims_lines: bool) -> None:
        """If `trims_lines` is True, a line break before and after each value is removed."""
        properties = (schema or {}).get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
        self._trims_lines = trims_lines
        self._is_first = True
        self._is_at_start = True
        self._types: set[str] = set()
        self._held = ""

    def begin_value(self, key: str, *, is_text: bool = False) -> str:
        """`is_text` is True if the model marks the value as a string."""
        self._types = {"string"} if is_text else types_of(self._properties.get(key))
        self._is_at_start = True
        self._held = ""
        before = "{" if self._is_first else ", "
        self._is_first = False
        quote = '"' if self._is_string else ""
        return f'{before}"{escaped(key)}": {quote}'

    def push(self, text: str) -> str:
        if not text:
            return ""
        if self._is_at_start and self._trims_lines and text.startswith("\n"):
            text = text[1:]
        self._is_at_start = False
        self._held += text
        if not self._is_string:
            return ""
        num_kept = 1 if self._trims_lines and self._held.endswith("\n") else 0
        end = len(self._held) - num_kept
        now = self._held[:end]
        self._held = self._held[end:]
        return escaped(now)

    def end_value(self) -> str:
        if self._trims_lines:
            self._held = self._held.removesuffix("\n")
        held = self._held
        self._held = ""
        if self._is_string:
            return escaped(held) + '"'
        text = held.strip()
        text = _PYTHON_LITERALS.get(text, text)
        value = loaded(text)
        if value is None and (literal := _from_python(text)):
            text = literal
            value = loaded(literal)
        is_json = value is not None or text == "null"
        names = _TYPE_NAMES.get(type(value), ("string",))
        if is_json and (not self._types or self._types.intersection(names)):
            return text
        return f'"{escaped(held)}"'

    def cut(self, key: str = "") -> str:
        """Returns the last piece of the JSON if the answer ends within a parameter.

        `key` is the incomplete name of the parameter; "" if the answer ends within a value.
        """
        if key:
            return f'{"{" if self._is_first else ", "}"{escaped(key)}'
        held = self._held
        self._held = ""
        return escaped(held) if self._is_string else held

    def end(self) -> str:
        return "{}" if self._is_first else "}"

    @property
    def _is_string(self) -> bool:
        return self._types == {"string"}


def _from_python(text: str) -> str:
    """Returns the JSON of an object or array in Python syntax; "" for other text."""
    if not text.startswith(("{", "[", "(")) or len(text) > _LITERAL_CHARACTERS_MAX:
        return ""
    try:
        with warnings.catch_warnings(action="ignore"):  # invalid escapes in the text cause warnings
            return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ""


def types_of(schema: Any) -> set[str]:
    """Returns the names of a schema's types; empty if the schema has none."""
    if not isinstance(schema, dict):
        return set()
    declared = schema.get("type")
    found = {
        t for t in (declared if isinstance(declared, list) else [declared]) if isinstance(t, str)
    }
    for alternative in (*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))):
        found |= types_of(alternative)
    values = _list(schema.get("enum"))
    if not found and values and all(isinstance(v, str) for v in values):
        found = {"string"}
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []

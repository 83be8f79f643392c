"""Builds the JSON of a call's arguments from parameters that a model writes as tags.

For example, <parameter=city>Rome</parameter> becomes {"city": "Rome"}. The tags do not show the
type of a value, so the types come from the function's schema. A string value is returned while the
model writes the string. Any other value is returned once the value is complete.

Values may have tags inside, if the model writes objects and arrays as tags: the keys of an object,
or the tag "item" for each item of an array.
"""

import ast
import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.router.parsers.json_text import escaped, loaded

_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}
# Longest value that is parsed as a Python literal, such as {'a': True}. Parsing takes up to 10 ms.
# A longer value is treated as text.
_LITERAL_CHARACTERS_MAX = 1 << 13
_ALTERNATIVES_MAX = 64  # schemas that are read for the types of one value
_EMPTY = {"object": "{}", "array": "[]"}
_TYPE_NAMES: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    dict: ("object",),
    list: ("array",),
    type(None): ("null",),
}


@dataclass(slots=True)
class _Value:
    """A value that the model has begun: a parameter's value, or one inside another value."""

    key: str
    schema: Any
    types: set[str]
    text: str = ""
    inner: list[tuple[str, str]] = field(default_factory=list)  # (key, JSON) of the values inside

    @property
    def is_string(self) -> bool:
        return self.types == {"string"}

    def json(self) -> str:
        """Returns the JSON of the value, which is complete."""
        if self.inner:
            is_array = "array" in self.types or all(key == "item" for key, _ in self.inner)
            if is_array and "object" not in self.types:
                return f"[{', '.join(text for _, text in self.inner)}]"
            pairs = (f'"{escaped(key)}": {text}' for key, text in dict(self.inner).items())
            return f"{{{', '.join(pairs)}}}"
        text = self.text.strip()
        if not text and len(self.types & _EMPTY.keys()) == 1:
            return _EMPTY[(self.types & _EMPTY.keys()).pop()]
        text = _PYTHON_LITERALS.get(text, text)
        value = loaded(text)
        if value is None and (literal := _from_python(text)):
            text = literal
            value = loaded(literal)
        is_json = value is not None or text == "null"
        names = _TYPE_NAMES.get(type(value), ("string",))
        if is_json and not self.is_string and (not self.types or self.types.intersection(names)):
            return text
        return f'"{escaped(self.text)}"'


class PairArguments:
    """Writes the JSON of one call's arguments. Each method returns the next piece of the JSON.

    The caller calls `begin_value`, `push` and `end_value` for each parameter, and then `end`. For a
    value inside another one, it calls `begin_value` before it ends the outer value.
    Example: the pieces `{"city": "`, `Rome`, `"` and `}` of the JSON `{"city": "Rome"}`.
    """

    def __init__(self, schema: Mapping[str, Any] | None, *, trims_lines: bool) -> None:
        """If `trims_lines` is True, a line break before and after each value is removed."""
        self._schema: Any = schema or {}
        self._trims_lines = trims_lines
        self._is_first = True
        self._is_at_start = True
        self._open: list[_Value] = []  # the parameter's value, and the values inside it

    @property
    def is_in_value(self) -> bool:
        """True if a value has begun and not ended."""
        return bool(self._open)

    def begin_value(self, key: str, *, is_text: bool = False) -> str:
        """`is_text` is True if the model marks the value as a string."""
        outer = self._open[-1].schema if self._open else self._schema
        schema = _schema_of(key, outer, self._schema)
        types = {"string"} if is_text else _all_types(schema, self._schema)
        self._open.append(_Value(key, schema, types))
        if len(self._open) > 1:
            return ""
        self._is_at_start = True
        before = "{" if self._is_first else ", "
        self._is_first = False
        quote = '"' if self._open[0].is_string else ""
        return f'{before}"{escaped(key)}": {quote}'

    def push(self, text: str) -> str:
        if not text:
            return ""
        value = self._open[-1]
        if len(self._open) > 1:
            value.text += text
            return ""
        if self._is_at_start and self._trims_lines and text.startswith("\n"):
            text = text[1:]
        self._is_at_start = False
        value.text += text
        if not value.is_string:
            return ""
        num_kept = 1 if self._trims_lines and value.text.endswith("\n") else 0
        end = len(value.text) - num_kept
        now = value.text[:end]
        value.text = value.text[end:]
        return escaped(now)

    def end_value(self) -> str:
        value = self._open.pop()
        if self._open:
            outer = self._open[-1]
            if outer.is_string:  # Such a value has no values inside, so they are text of it.
                return self.push(f"{value.key}: {value.json()}")
            outer.inner.append((value.key, value.json()))
            return ""
        if self._trims_lines:
            value.text = value.text.removesuffix("\n")
        return escaped(value.text) + '"' if value.is_string else value.json()

    def cut(self, key: str = "") -> str:
        """Returns the last piece of the JSON if the answer ends within a parameter.

        `key` is the incomplete name of the parameter; "" if the answer ends within a value.
        """
        if key and not self._open:
            return f'{"{" if self._is_first else ", "}"{escaped(key)}'
        held = []
        for depth, value in enumerate(self._open):
            # The JSON has the name of the parameter already, but not those of values inside it.
            held += [value.key] if depth else []
            held += [part for pair in value.inner for part in pair] + [value.text]
        held.append(key)
        is_string = bool(self._open) and self._open[0].is_string
        self._open = []
        return escaped("".join(held)) if is_string else "".join(held)

    def end(self) -> str:
        return "{}" if self._is_first else "}"


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
    return _all_types(schema, {})


def _all_types(schema: Any, root: Any) -> set[str]:
    """Returns the names of a schema's types. References in it name definitions in `root`."""
    found: set[str] = set()
    values = []
    for one in _alternatives(schema, root):
        declared = one.get("type")
        names = declared if isinstance(declared, list) else [declared]
        found |= {name for name in names if isinstance(name, str)}
        values += _list(one.get("enum"))
    if not found and values and all(isinstance(value, str) for value in values):
        found = {"string"}
    return found


def _schema_of(key: str, outer: Any, root: Any) -> Any:
    """Returns the schema of the value with this key inside a value with the schema `outer`; None if
    the schema does not tell."""
    for one in _alternatives(outer, root):
        properties = one.get("properties")
        if isinstance(properties, dict) and key in properties:
            return properties[key]
        if key == "item" and "items" in one:
            return one["items"]
    return next(
        (
            more
            for one in _alternatives(outer, root)
            if isinstance(more := one.get("additionalProperties"), dict)
        ),
        None,
    )


def _alternatives(schema: Any, root: Any) -> Iterator[dict[str, Any]]:
    """Yields a schema and the schemas that it refers to or combines, at most
    `_ALTERNATIVES_MAX`."""
    left = [schema]
    for _ in range(_ALTERNATIVES_MAX):
        if not left:
            return
        one = left.pop(0)
        if not isinstance(one, dict):
            continue
        yield one
        for keyword in ("anyOf", "oneOf", "allOf"):
            left += _list(one.get(keyword))
        if isinstance(reference := one.get("$ref"), str):
            target = root
            for part in reference.split("/")[1:]:
                target = target.get(part) if isinstance(target, dict) else None
            left.append(target)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []

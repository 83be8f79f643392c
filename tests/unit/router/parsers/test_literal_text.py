"""Calls in the notations of Python and Gemma become the JSON of their arguments."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.router.parsers.literal_text import GEMMA, PYTHON, LiteralCall, Notation

KEYS = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # A lone surrogate has no UTF-8, so no model writes one.
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


def read(text: str, notation: Notation) -> tuple[str, str]:
    """Returns the name and the JSON of the arguments of a whole call."""
    call = LiteralCall(notation)
    added = "".join(map(call.push, text))
    assert call.has_ended, (text, added)
    return call.name, added


def is_broken(text: str, notation: Notation) -> bool:
    call = LiteralCall(notation)
    for char in text:
        call.push(char)
        if call.is_broken:
            return True
    return False


def gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{gemma(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(gemma, value))}]"
    return json.dumps(value)


@settings(max_examples=60)
@given(arguments=st.dictionaries(KEYS, VALUES, max_size=3))
def test_any_arguments_are_read_as_they_were_written(arguments: dict[str, Any]) -> None:
    python = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    name, added = read(f"find({python})", PYTHON)
    assert (name, json.loads(added)) == ("find", arguments)
    text = f"call:find{gemma(arguments)}"
    name, added = read(text, GEMMA)
    assert (name, json.loads(added)) == ("find", arguments)


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("", "{}"),
        (" ", "{}"),
        ("a=1,", '{"a": 1}'),
        ("a = 1 , b = 'c' ", '{"a": 1, "b": "c"}'),
        ('a="say \\"hi\\"\\n"', '{"a": "say \\"hi\\"\\n"}'),
        ("a='it's', b=2", '{"a": "it\'s", "b": 2}'),
        ("a='\\u00e9\\x41\\d\\u0g\\u'", '{"a": "\\u00e9\\u0041\\\\d\\\\u0g\\\\u"}'),
        ("a=.5, b=1_000, c=1., d=celsius, e=-3e5", None),
        ("a=(1, 'x'), b={'k': null}", '{"a": [1, "x"], "b": {"k": null}}'),
        ("a={\"k\": true, 'l': False}, b=None", '{"a": {"k": true, "l": false}, "b": null}'),
        ("a=[[], [[1,],], {}]", '{"a": [[], [[1]], {}]}'),
    ],
)
def test_what_models_write_in_python(written: str, arguments: str | None) -> None:
    wanted = arguments or '{"a": 0.5, "b": 1000, "c": 1.0, "d": "celsius", "e": -3e5}'
    assert read(f"f({written})", PYTHON) == ("f", wanted)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("call:f{}", "{}"),
        ('call:f{<|"|>k<|"|>:1,l:bare}', '{"k": 1, "l": "bare"}'),
        ('call:f{a:<|"|>{}"\'\\n<|"<|"|>}', '{"a": "{}\\"\'\\\\n<|\\""}'),
    ],
)
def test_what_gemma_writes(text: str, arguments: str) -> None:
    assert read(text, GEMMA) == ("f", arguments)


@pytest.mark.parametrize(
    "text",
    ["Hello there", "f(1)", "f(a)", "f(a=)", "f(a=[1,,2])", "f(a=g(1))", "f(a=1]", "(a=1)",
     "f(a 1)", "f(a={1, 2})", "f(a=" + "[" * 200, "f(a=" + "1" * 600],
)  # fmt: skip
def test_what_is_no_call_is_broken(text: str) -> None:
    assert is_broken(text, PYTHON)


def test_strings_and_names_stream() -> None:
    call = LiteralCall(PYTHON)
    assert "".join(map(call.push, "find(q='Par")) == '{"q": "Par'
    assert (call.name, call.is_streaming, call.has_ended) == ("find", True, False)


@pytest.mark.parametrize(
    ("notation", "call"), [(GEMMA, "call:f{{x:{{a{}:1}}}}"), (PYTHON, "f(x={{a{}:1}})")]
)
def test_space_ends_a_key_without_quotes(notation: Notation, call: str) -> None:
    assert read(call.format("  "), notation) == ("f", '{"x": {"a": 1}}')
    assert is_broken(call.format(" b"), notation)

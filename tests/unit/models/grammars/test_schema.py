"""Schemas of pydantic, zod and other libraries, as the compiler reads them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from tandem.errors import BadRequest
from tandem.models.grammars.compiler import GrammarCompiler
from tandem.models.grammars.schema import FORMATS, closed, regex_error, rewritten
from tandem.models.grammars.text import StructuredOutput, grammar_text
from tandem.models.source import resolve
from tandem.router.request.prompt.grammar_checker import checked_grammar

LOOKAHEAD = "^(?!a).+$"


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler.of(resolve("smollm2"))


def text_of(schema: Any, *, is_strict: bool) -> str:
    form = StructuredOutput("f", "json_schema", json.dumps(schema), is_lenient=not is_strict)
    return grammar_text(form)


def takes(compiler: GrammarCompiler, schema: Any, value: Any, *, is_strict: bool = True) -> bool:
    """Returns whether the grammar of a schema allows a JSON value."""
    matcher = compiler.compile(text_of(schema, is_strict=is_strict))
    ids = compiler._vocabulary().tokenize_str(json.dumps(value))
    return bool(matcher.validate_tokens(ids) == len(ids))


def of_object(value: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"v": value},
        "required": ["v"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize(
    "value",
    [
        *({"type": "string", "format": name} for name in ("password", "binary", "path", "cuid2")),
        {"type": "integer", "format": "int64"},
        {"type": "array", "items": {"type": "string", "format": "jwt"}},
        {"anyOf": [{"type": "string", "format": "e164"}, {"type": "null"}]},
        {"type": "object", "propertyNames": {"type": "string"}},
        {"type": "object", "propertyNames": {"type": ["string"], "minLength": 0, "title": "a"}},
        {"type": "object", "propertyNames": True, "additionalProperties": {"type": "boolean"}},
        {"type": "object", "propertyNames": {}, "properties": {"a": {"type": "integer"}}},
        {"type": "object", "propertyNames": {"pattern": "^a"}},
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}},
        {"type": "string", "deprecated": True, "x-order": 1, "examples": [{"format": "q"}]},
        {"type": "array", "items": {"type": "string"}, "uniqueItems": False},
        {"type": "object", "unevaluatedProperties": True, "dependentRequired": {}},
        # zod's float32 and float64, and the integers of 64 bits
        *(
            {"type": kind, "minimum": -bound, "maximum": bound}
            for kind, bound in (
                *(("number", 3.4028234663852886e38), ("number", 1.7976931348623157e308)),
                *(("integer", 1 << 63), ("integer", 1e19)),
            )
        ),
        {"type": "integer", "minimum": 0.0, "exclusiveMaximum": (1 << 64) - 1},
        # libraries that write null for a keyword that is not set
        {"type": "object", "properties": None, "required": None, "additionalProperties": None},
        {"type": "string", "enum": None, "minLength": None, "pattern": None, "default": None},
        {"anyOf": [{"type": "number", "maximum": None}, {"const": None}]},
    ],
    ids=json.dumps,
)
def test_what_restricts_nothing_refuses_nothing(value: Any, is_strict: bool) -> None:
    assert not LLMatcher.validate_grammar(text_of(of_object(value), is_strict=is_strict))


def test_known_formats_stay() -> None:
    for name in FORMATS:
        schema = {"type": "string", "format": name}
        assert rewritten(schema, is_strict=True) == schema
        assert not LLMatcher.validate_grammar(text_of(schema, is_strict=True))


def test_data_is_no_schema() -> None:
    """A property may be called like a keyword, and an enumeration may have any value."""
    schema = {
        "properties": {"format": {"const": {"format": "x", "pattern": LOOKAHEAD}}, "pattern": {}},
        "enum": [{"format": "x", "propertyNames": {}}],
        "default": {"pattern": LOOKAHEAD},
        "required": ["format"],
    }
    assert rewritten(schema, is_strict=True) == schema


def test_a_bound_beyond_the_compilers_counts_where_it_must(compiler: GrammarCompiler) -> None:
    schema = of_object({"type": "integer", "minimum": 0, "maximum": (1 << 63) - 1})
    for value, is_strict, allowed in (
        (1 << 62, True, True),
        (1 << 64, True, False),
        (1 << 64, False, True),
        (-1, False, False),
    ):
        assert takes(compiler, schema, {"v": value}, is_strict=is_strict) == allowed


def test_names_of_properties_keep_their_meaning(compiler: GrammarCompiler) -> None:
    listed = {"type": "object", "propertyNames": {"enum": ["a", "b"]}}
    listed |= {"additionalProperties": {"type": "integer"}}
    begun = {"type": "object", "propertyNames": {"pattern": "^a[0-9]$"}}
    for schema, right, wrong in (
        (listed, {"a": 1, "b": 2}, {"c": 1}),
        (listed, {"b": 2}, {"a": "x"}),
        (begun, {"a1": [None]}, {"b1": 1}),
        # Where a pattern and a property name one key, both schemas count.
        (
            {
                "type": "object",
                "properties": {"ab": {"minimum": 3}},
                "patternProperties": {"^a": {"type": "integer"}},
                "additionalProperties": False,
            },
            {"ab": 4},
            {"ab": 1},
        ),
    ):
        jsonschema.validate(right, schema)
        assert takes(compiler, schema, right)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
        assert not takes(compiler, schema, wrong)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (LOOKAHEAD, "look-around"),
        (r"^(?<=a)b$", "look-around"),
        (r"^(a)\1$", "backreferences"),
        (r"\bfoo\b", "lookarounds"),
        ("^[[a]$", "unclosed character class"),
        (r"^\cA$", "unrecognized escape"),
        ("(", "unclosed group"),
    ],
)
def test_a_pattern_that_cannot_be_read(pattern: str, why: str) -> None:
    inside = {"type": "array", "items": of_object({"type": "string", "pattern": pattern})}
    schema = of_object({"type": "object", "properties": {"mail": inside}})
    assert why in regex_error(pattern)
    assert not LLMatcher.validate_grammar(text_of(schema, is_strict=False))
    with pytest.raises(BadRequest) as refused:
        text_of(schema, is_strict=True)
    for said in (repr(pattern), "'v.mail.v'", why, "f cannot be used"):
        assert said in refused.value.message
    keys = {"type": "object", "patternProperties": {pattern: {"type": "integer"}, "^b": {}}}
    assert not LLMatcher.validate_grammar(text_of(of_object(keys), is_strict=False))
    with pytest.raises(BadRequest, match="patternProperties"):
        text_of(of_object(keys), is_strict=True)


def test_a_key_pattern_that_is_left_out_leaves_its_keys(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "patternProperties": {LOOKAHEAD: {"type": "integer"}}}
    schema |= {"additionalProperties": False}
    assert takes(compiler, schema, {"b": 1}, is_strict=False)
    assert not takes(compiler, schema, {"b": "x"}, is_strict=False)


def test_keys_of_several_left_out_patterns_have_one_of_their_schemas(
    compiler: GrammarCompiler,
) -> None:
    patterns = {"^(?=a)": {"type": "integer"}, "^(?=b)": {"type": "string"}}
    schema = {"type": "object", "patternProperties": patterns, "additionalProperties": False}
    assert takes(compiler, schema, {"a": 1}, is_strict=False)
    assert takes(compiler, schema, {"b": "x"}, is_strict=False)
    assert not takes(compiler, schema, {"b": []}, is_strict=False)


def test_names_that_are_not_listed_stay_forbidden() -> None:
    schema = {"patternProperties": {"^x": {}}, "propertyNames": {"enum": ["a"]}}
    assert rewritten(schema, is_strict=True) == schema  # the compiler refuses it


@pytest.mark.parametrize("own", [None, ["a"], 5])
@pytest.mark.parametrize("rule", [{"enum": ["a"]}, {"const": "a"}, {"pattern": "^a"}])
def test_what_is_no_schema_is_left_to_the_compiler(own: Any, rule: Any) -> None:
    schema = {"properties": own, "propertyNames": rule, "required": [["a"], {}, 5]}
    assert rewritten(schema, is_strict=False) == schema
    assert closed({"properties": {"a": {}}, **schema}) is not None


def test_a_pattern_that_can_be_read_counts(compiler: GrammarCompiler) -> None:
    schema = of_object({"type": "string", "pattern": "^[ab]+$", "format": "password"})
    for is_strict in (True, False):
        assert takes(compiler, schema, {"v": "ab"}, is_strict=is_strict)
        assert not takes(compiler, schema, {"v": "c"}, is_strict=is_strict)


def test_an_error_in_a_regular_expression_gives_its_reason(compiler: GrammarCompiler) -> None:
    form = StructuredOutput("guided_regex", "regex", LOOKAHEAD)
    with pytest.raises(BadRequest, match="look-around"):
        checked_grammar(compiler, form)


A = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "value", "allowed"),
    [
        ({}, {"x": 1}, False),
        ({}, {}, True),
        ({"type": "object"}, {"x": 1}, False),
        ({"type": "object", "properties": {}}, {"x": 1}, False),
        ({"additionalProperties": True}, {"x": 1}, True),
        ({"patternProperties": {"^x": {}}}, {"x": 1}, True),
        (A, {"a": 1}, True),
        (A, {"a": 1, "x": 1}, False),
        ({**A, "additionalProperties": {}}, {"a": 1, "x": 1}, True),
        ({**A, "required": ["x"]}, {"a": 1, "x": 1}, True),
        ({"properties": {"o": A}}, {"o": {"a": 1, "x": 1}}, False),
        ({"properties": {"o": {"type": "object"}}}, {"o": {"x": 1}}, True),
        ({"properties": {"o": {"type": "array", "items": A}}}, {"o": [{"x": 1}]}, False),
        ({"properties": {"o": {"anyOf": [A, {"type": "null"}]}}}, {"o": {"x": 1}}, False),
        ({"properties": {"o": {"anyOf": [A, {"type": "null"}]}}}, {"o": {"a": 1}}, True),
        # Two schemas of one object: either may list what the other does not.
        ({"allOf": [A, {"properties": {"x": {}}}]}, {"a": 1, "x": 1}, True),
        ({**A, "anyOf": [{"properties": {"x": {"type": "integer"}}}]}, {"a": 1, "x": 1}, True),
        ({"properties": {"o": {"$ref": "#/$defs/A"}}, "$defs": {"A": A}}, {"o": {"x": 1}}, False),
        (
            {
                "properties": {"o": {"$ref": "#/$defs/A", "properties": {"x": {}}}},
                "$defs": {"A": A},
            },
            {"o": {"a": 1, "x": 1}},
            True,
        ),
        # References to other parts than definitions, as zod writes them.
        (
            {
                "properties": {
                    "b": A,
                    "o": {"allOf": [{"$ref": "#/properties/b"}, {"required": ["x"]}]},
                },
                "required": ["o"],
            },
            {"o": {"a": 1, "x": 1}},
            True,
        ),
        (
            {
                "properties": {"o": {"$ref": "#/$defs/A", "required": ["x"]}},
                "$defs": {"A": A},
            },
            {"o": {"a": 1, "x": 1}},
            True,
        ),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_an_object_has_no_properties_that_nobody_listed(
    compiler: GrammarCompiler, schema: Any, value: Any, allowed: bool
) -> None:
    before = json.dumps(schema)
    made = closed(schema)
    assert json.dumps(schema) == before, "the client's schema does not change"
    assert takes(compiler, made, value, is_strict=False) == allowed
    if allowed:
        jsonschema.validate(value, schema)

"""Every answer that a forced grammar allows is read back as calls that fit their schemas.

The grammars are llguidance's real ones over the real vocabulary. In place of a model, tokens are
drawn from the masks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from tandem.common.config.answers import AnswerConfig
from tandem.errors import BadRequest
from tandem.models.grammars.text import SOURCE_BYTES_MAX, StructuredOutput, grammar_text
from tandem.router.parsers.formats import REASONING_TAGS, TOOL_FORMATS
from tandem.router.parsers.machine import CallDelta
from tandem.router.parsers.model_format import ModelFormat
from tandem.router.request.text import TextStream
from tests.unit.router.parsers.conftest import EOS, drawn, vocabulary

SEEDS = 6
SEEDS_MAX = 24
CITY = {"type": "string", "minLength": 1, "maxLength": 6}
WEATHER = {
    "type": "object",
    "properties": {
        "city": CITY,
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "note": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
        "place": {"$ref": "#/$defs/Place"},
    },
    "required": ["city", "place"],
    "additionalProperties": False,
    "$defs": {
        "Place": {
            "type": "object",
            "properties": {"at": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
            "required": ["at"],
            "additionalProperties": False,
        }
    },
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS: dict[str, Any] = {"get_weather": WEATHER, "now": NOTHING}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]


class Setup:
    """A model's format, and its grammars compiled as an engine compiles them."""

    def __init__(self, folder: Path, tools: str, reasoning: str = "none") -> None:
        self.tokenizer, self.compiler = vocabulary(folder)
        config = AnswerConfig(tool_parser=tools, reasoning_parser=reasoning)  # type: ignore[arg-type]
        self.answers = ModelFormat(self.tokenizer, config)

    def matcher(self, tools: Any, prompt: list[int], *, one: bool) -> LLMatcher:
        form = self.answers.forced_calls(tools, prompt, one_call_only=one)
        text = grammar_text(form)
        assert self.compiler.check(text) == ""
        return self.compiler.compile(text)

    def read(
        self, ids: list[int], prompt: list[int], tools: Any, *, one: bool
    ) -> tuple[str, list[Any]]:
        """Returns content and calls; the same for the whole answer and for each single token."""
        found = []
        for size in (len(ids), 1):
            parser = self.answers.answer_parser(tools, prompt, one_call_only=one)
            stream = TextStream(self.tokenizer, (), parser)
            pieces = [ids[i : i + size] for i in range(0, len(ids), size)]
            read = [stream.push(p, "stop" if p[-1] == EOS else "") for p in pieces]
            calls: dict[int, CallDelta] = {}
            for delta in [call for piece in read for call in piece.tool_calls]:
                call = calls.setdefault(delta.index, CallDelta(delta.index, "", "", delta.name))
                call.arguments += delta.arguments
            content = "".join(piece.text for piece in read)
            reasons = {piece.finish_reason for piece in read if piece.finish_reason}
            assert reasons == {"tool_calls"}, (size, reasons)
            found.append((content, [(c.name, json.loads(c.arguments)) for c in calls.values()]))
        assert found[0] == found[1]
        return found[0]


def is_valid(calls: list[Any]) -> Iterator[bool]:
    for name, arguments in calls:
        jsonschema.validate(arguments, SCHEMAS[name])
        yield True


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_each_format_calls_by_its_schemas(name: str, folder: Path) -> None:
    setup = Setup(folder, name)
    is_single = name == "harmony"  # its answers have one call
    num_ended = 0
    num_calls = 0
    matcher = setup.matcher(TOOLS, [1], one=False)
    for seed in range(SEEDS_MAX):  # A model that thinks may think without an end.
        ids = drawn(setup.tokenizer, matcher.deep_copy(), seed, [])
        if ids is None:
            continue
        content, calls = setup.read(ids, [1], TOOLS, one=False)
        assert content == ""
        assert all(is_valid(calls))
        num_ended = num_ended + 1
        num_calls = num_calls + len(calls)
        if num_ended >= 2 and (is_single or num_calls > num_ended):
            return
    raise AssertionError(f"{num_ended} of {SEEDS_MAX} answers ended, with {num_calls} calls")


TREE = {
    "type": "object",
    "properties": {
        "root": {"$ref": "#/$defs/Node"},
        "kind": {"enum": ["a", 7, None]},
        "labels": {"type": "object", "additionalProperties": {"type": "integer"}},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["root", "kind", "labels", "sizes"],
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 3},
                "child": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
            },
            "required": ["name"],
        }
    },
}


@pytest.mark.parametrize("name", ["gemma4", "minimax_m3"])
def test_nested_values_follow_their_schemas(name: str, folder: Path) -> None:
    setup = Setup(folder, name)
    tools = [{"type": "function", "function": {"name": "grow", "parameters": TREE}}]
    matcher = setup.matcher(tools, [1], one=True)
    num_read = 0
    for seed in range(SEEDS_MAX):
        ids = drawn(setup.tokenizer, matcher.deep_copy(), seed, [])
        if ids is not None:
            _, [(_, arguments)] = setup.read(ids, [1], tools, one=True)
            jsonschema.validate(arguments, TREE)
            num_read += 1
        if num_read == 2:
            return
    raise AssertionError(f"only {num_read} of {SEEDS_MAX} answers ended")


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_one_call_of_a_named_function(name: str, folder: Path) -> None:
    setup = Setup(folder, name)
    matcher = setup.matcher(TOOLS[:1], [1], one=True)
    read = [drawn(setup.tokenizer, matcher.deep_copy(), seed, []) for seed in range(SEEDS)]
    for ids in filter(None, read):
        # Without the parser's own rule of one call: the grammar allows no second one.
        content, [(called, arguments)] = setup.read(ids, [1], TOOLS[:1], one=False)
        assert (content, called) == ("", "get_weather")
        jsonschema.validate(arguments, WEATHER)
    assert any(read)


@pytest.mark.parametrize(
    ("reasoning", "tools"),
    [
        ("think", "hermes"),
        ("mistral", "mistral"),
        ("gemma4", "gemma4"),
        ("cohere", "cohere"),
        ("minimax_m3", "minimax_m3"),
        ("think", "deepseek_v4"),
    ],
)
@pytest.mark.parametrize("is_open", [True, False])
def test_reasoning_comes_before_the_calls(
    reasoning: str, tools: str, folder: Path, *, is_open: bool
) -> None:
    setup = Setup(folder, tools, reasoning)
    tags = REASONING_TAGS[reasoning]
    assert tags is not None
    encode = setup.tokenizer._tokenizer.encode
    prompt = encode(tags.opens).ids if is_open else [1]
    thought = f"{'' if is_open else tags.opens}Which one?{tags.closes}\n"
    begun = encode(thought).ids
    matcher = setup.matcher(TOOLS, prompt, one=True)
    if not is_open:  # nobody has to think
        read = (drawn(setup.tokenizer, matcher.deep_copy(), seed, []) for seed in range(SEEDS_MAX))
        assert any(read)
    ids = drawn(setup.tokenizer, matcher, 1, begun)
    assert ids is not None
    content, calls = setup.read(ids, prompt, TOOLS, one=True)
    assert (content, len(calls)) == ("", 1)


def test_a_template_that_ends_the_reasoning_leaves_none(folder: Path) -> None:
    setup = Setup(folder, "hermes", "think")
    encode = setup.tokenizer._tokenizer.encode
    matcher = setup.matcher(TOOLS, encode("<think>\n\n</think>\n\n").ids, one=True)
    matcher.consume_tokens(encode("<think>").ids)
    assert matcher.is_error()


@pytest.mark.parametrize(
    ("parser", "function", "why"),
    [
        ("hermes", {"name": "f", "parameters": {"type": "string"}}, "must be object"),
        ("mistral", {"name": "a b"}, "a b"),
        ("glm45", {"name": "f", "parameters": {"anyOf": [{}]}}, "anyOf"),
        ("glm45", {"name": "f", "parameters": {"properties": {"a b": {}}}}, "a b"),
        ("glm45", {"name": "f", "parameters": {"properties": {"a": False}}}, "schema"),
        ("qwen3_coder", {"name": "f", "parameters": {"required": 1}}, "schema"),
        ("gemma4", {"name": "f", "parameters": {"properties": {"a:b": {}}}}, "a:b"),
        ("gemma4", {"name": "f", "parameters": {"properties": {"a": {"$ref": "#/b"}}}}, "#/b"),
        ("gemma4", {"name": "f", "parameters": {"properties": {"a": {"enum": 1}}}}, "enum"),
        (
            "qwen3_coder",
            {
                "name": "f",
                "parameters": {"properties": {"a": {"type": "string", "maxLength": "9"}}},
            },
            "minLength and maxLength",
        ),
        (
            "qwen3_coder",
            {
                "name": "f",
                "strict": True,
                "parameters": {"properties": {"a": {"type": "string", "pattern": "x"}}},
            },
            "pattern",
        ),
    ],
)
def test_a_tool_that_cannot_be_forced_is_named(
    parser: str, function: dict[str, Any], why: str, folder: Path
) -> None:
    setup = Setup(folder, parser)
    tools = [{"type": "function", "function": function}]
    if parser == "mistral" and not setup.tokenizer.added_token_id("[ARGS]"):
        return  # its calls are JSON, which takes any name
    with pytest.raises(BadRequest, match=why) as raised:
        setup.answers.forced_calls(tools, [1], one_call_only=False)
    assert raised.value.param == "tools"


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_descriptions_of_many_tools_are_not_too_long(name: str, folder: Path) -> None:
    text = {"type": "string", "title": "A", "description": "Long. " * 300}
    place = {"type": "object", "properties": {"title": text}, "description": "Long. " * 300}
    schema = {"type": "object", "properties": {"description": text, "place": place}}
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(40)
    ]
    assert len(json.dumps(tools)) > SOURCE_BYTES_MAX
    setup = Setup(folder, name)
    form = setup.answers.forced_calls(tools, [1], one_call_only=True)
    assert "Long" not in form.source
    assert "title" in form.source


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_keyword_that_is_null_is_absent(name: str, strict: bool, folder: Path) -> None:
    """Servers of tools that are written in Go send such schemas."""
    inner = {"type": "object", "properties": {"b": {"type": "string"}}, "required": None}
    schemas = (
        {"type": "object", "properties": None, "required": None},
        {"type": "object", "properties": {"a": inner}, "required": ["a"], "$defs": None},
    )
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "strict": strict, "parameters": schema}}
        for i, schema in enumerate(schemas)
    ]
    Setup(folder, name).matcher(tools, [1], one=True)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_call_or_a_form(name: str, folder: Path) -> None:
    """With tools and a form, an answer is either calls or has the form, as with OpenAI."""
    setup = Setup(folder, name)
    own = {"type": "object", "properties": {"z": {"const": 7}}, "required": ["z"]}
    wanted = StructuredOutput("response_format", "json_schema", json.dumps(own))
    form = setup.answers.calls_or(wanted, TOOLS, [1], one_call_only=True)
    if name.startswith("llama"):  # whose calls are objects, too
        assert form == setup.answers.after_reasoning(wanted, [1])
        return
    text = grammar_text(form)
    assert setup.compiler.check(text) == ""
    either = setup.compiler.compile(text)
    forced = setup.matcher(TOOLS, [1], one=True)
    calls = (drawn(setup.tokenizer, forced.deep_copy(), seed, []) for seed in range(SEEDS_MAX))
    ids = next(filter(None, calls))
    assert either.validate_tokens(ids) == len(ids)
    alone = setup.compiler.compile(grammar_text(setup.answers.after_reasoning(wanted, [1])))
    answers = (drawn(setup.tokenizer, alone.deep_copy(), seed, []) for seed in range(SEEDS_MAX))
    ids = next(filter(None, answers))
    assert either.validate_tokens(ids) == len(ids)


def test_no_schema_of_a_tool_in_json_prevents_the_form(folder: Path) -> None:
    setup = Setup(folder, "hermes")
    wanted = StructuredOutput("response_format", "json_object")
    wrong = {"a": {"type": "no"}, "b": {"$ref": "#/$defs/None"}, "c": 5}
    schemas: tuple[Any, ...] = (None, {"properties": 5}, {"properties": wrong, "required": ["z"]})
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "strict": True, "parameters": schema}}
        for i, schema in enumerate(schemas)
    ]
    text = grammar_text(setup.answers.calls_or(wanted, tools, [1], one_call_only=False))
    assert setup.compiler.check(text) == ""


def test_a_form_stays_where_calls_cannot_be_written(folder: Path) -> None:
    setup = Setup(folder, "qwen3_coder")
    wanted = StructuredOutput("response_format", "json_object")
    tools = [{"type": "function", "function": {"name": "a b>"}}]
    form = setup.answers.calls_or(wanted, tools, [1], one_call_only=True)
    assert form == setup.answers.after_reasoning(wanted, [1])

"""Forms that a client may ask for, and hostile ones, in the router's own process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tandem.errors import BadRequest
from tandem.grammars.text import Kind, StructuredOutput
from tandem.models.source import resolve
from tandem.models.tokenizer import Tokenizer
from tandem.router.request.prompt.prompts import PromptPreparer

FOLDER = resolve("smollm2").path


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


REFS = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(40)}
RULES = "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(3000))
GOOD: dict[str, tuple[Kind, str]] = {
    "nested": ("json_schema", json.dumps(nested(20))),
    "references": ("json_schema", json.dumps({"$defs": {**REFS, "d40": {}}, "$ref": "#/$defs/d0"})),
    "recursive": ("json_schema", '{"properties": {"children": {"items": {"$ref": "#"}}}}'),
    "any": ("json_schema", "true"),
    "repeated": ("regex", "(a{1,1000}){1,1000}"),
    "long": ("json_schema", '{"type": "string", "minLength": 100000}'),
    "ambiguous": ("grammar", 'start: a a a a a a\na: a a | a a a | "x" | "x"?'),
    "GBNF": ("grammar", 'root ::= "yes" | "no"'),
    "an option of the compiler": ("json_schema", '{"x-guidance": {"lenient": true}}'),
}
BAD: dict[str, tuple[Kind, str, str]] = {
    "too deep": ("json_schema", json.dumps(nested(100)), "nested"),
    "a loop": ("json_schema", '{"$ref": "#"}', "no text|NoExtension"),
    "too wide": ("json_schema", json.dumps({"enum": [f"{i}" * 9 for i in range(9000)]}), "bytes"),
    "unknown keyword": ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
    "no schema": ("json_schema", "[1]", "object"),
    "no JSON": ("json_schema", "{", "cannot be followed"),
    "parentheses": ("regex", "(" * 20000 + "a" + ")" * 20000, "regex|nest"),
    "look-ahead": ("regex", "(?=a)b", "regex"),
    "no rule": ("grammar", "root: x", "cannot be followed"),
    "no text": ("choice", '["a", ""]', "non-empty"),
    "the stack": ("grammar", f'start: a0\n{RULES}\na3000: "x"', "stack"),
}


@pytest.fixture(scope="module")
def preparer() -> Iterator[PromptPreparer]:
    """The checks of a router; their process starts with the first."""
    preparer = PromptPreparer(FOLDER, Tokenizer(FOLDER), num_processes=1)
    yield preparer
    preparer.close()


async def grammar(preparer: PromptPreparer, kind: Kind, source: str, **fields: Any) -> str:
    wanted = StructuredOutput("guided_json", kind, source, **fields)
    return await preparer.grammar(wanted, "")


@pytest.mark.parametrize("name", GOOD)
async def test_what_can_be_followed_is_one_text(name: str, preparer: PromptPreparer) -> None:
    kind, source = GOOD[name]
    assert await grammar(preparer, kind, source)


@pytest.mark.parametrize("name", BAD)
async def test_a_hostile_grammar_is_refused_with_its_field(
    name: str, preparer: PromptPreparer
) -> None:
    kind, source, why = BAD[name]
    with pytest.raises(BadRequest, match=why) as caught:
        await grammar(preparer, kind, source)
    assert caught.value.param == "guided_json"
    assert len(caught.value.message) < 400


async def test_a_lenient_schema_leaves_out_what_is_not_supported(preparer: PromptPreparer) -> None:
    kind, source, _ = BAD["unknown keyword"]
    assert await grammar(preparer, kind, source, is_lenient=True)


async def test_a_grammar_is_checked_once(preparer: PromptPreparer) -> None:
    text = await grammar(preparer, "regex", "once")
    checked = len(preparer._checked)
    assert await grammar(preparer, "regex", "once") == text
    assert len(preparer._checked) == checked

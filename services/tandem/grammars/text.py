"""Turns what a client asks for into one grammar text, which llguidance reads."""

import json
from dataclasses import dataclass
from typing import Any, Literal

import llguidance

from tandem.errors import BadRequest

# "lark" is Tandem's own grammar: no client writes one.
Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "lark"]

SOURCE_BYTES_MAX = 128 << 10
DEPTH_MAX = 100  # of nested brackets in a schema
# White space between the tokens of JSON. A small model would write it without end.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form that a completion must have. `field` is the request's field that asked for it."""

    field: str
    kind: Kind
    source: str = ""  # a schema or a list of choices as JSON, a regular expression, or a grammar
    is_lenient: bool = False  # keywords of a schema that are not supported are ignored
    head: str = ""  # a Lark grammar of the whole completion, which names the form `@form`

    def __post_init__(self) -> None:
        size = len(self.source.encode(errors="replace"))
        if size > SOURCE_BYTES_MAX:
            raise BadRequest(
                f"{self.field} has {size} bytes; it must have at most {SOURCE_BYTES_MAX}",
                param=self.field,
            )


def grammar_text(wanted: StructuredOutput) -> str:
    """Returns the grammar. Raises BadRequest for a source that no grammar can be made of; what the
    compiler refuses is found by check.py."""
    form = _form_text(wanted)
    if not wanted.head:
        return form
    # llguidance writes schemas and regular expressions as a list of one grammar, others in Lark.
    is_list = wanted.kind in ("json_object", "json_schema", "regex")
    [grammar] = json.loads(form)["grammars"] if is_list else [{"lark_grammar": form}]
    return json.dumps({"grammars": [{"lark_grammar": wanted.head}, {**grammar, "name": "form"}]})


def _form_text(wanted: StructuredOutput) -> str:
    try:
        match wanted.kind:
            case "json_object":
                return _json_grammar({"type": "object"}, lenient=False)
            case "json_schema":
                schema = json.loads(wanted.source)
                return _json_grammar(schema, lenient=wanted.is_lenient)
            case "choice":
                choices = " | ".join(json.dumps(choice) for choice in _choices(wanted.source))
                return llguidance.LLMatcher.grammar_from_lark(f"start: {choices}")
            case "regex":
                return llguidance.LLMatcher.grammar_from_regex(wanted.source)
            case "grammar":
                return llguidance.grammar_from("grammar", wanted.source)
            case "lark":
                return llguidance.LLMatcher.grammar_from_lark(wanted.source)
    except (ValueError, RecursionError) as error:
        raise refused(wanted.field, str(error)) from None


def refused(field: str, why: str) -> BadRequest:
    """Returns the error for a field that no completion can follow."""
    reason = next((line for line in why.splitlines() if line.strip()), "it is too deeply nested")
    return BadRequest(f"{field} cannot be followed: {reason[:300]}", param=field)


def embedded_schema(schema: object, *, is_lenient: bool) -> str:
    """Returns a schema with the compiler's options in it, as JSON to embed in a grammar. Raises
    ValueError for what is no schema."""
    options = {"whitespace_pattern": _WHITESPACE, "lenient": is_lenient}
    return json.dumps({**_checked_schema(schema), "x-guidance": options})


def _json_grammar(schema: object, *, lenient: bool) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(_checked_schema(schema)),
        overrides={"whitespace_pattern": _WHITESPACE, "lenient": lenient},
    )


def _checked_schema(schema: object) -> dict[str, Any]:
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("a schema is a JSON object")
    if _depth(schema) > DEPTH_MAX:
        raise ValueError(f"the schema is nested more than {DEPTH_MAX} deep")
    # Ours, not the schema's: it must not set the compiler's options.
    return {name: value for name, value in schema.items() if name != "x-guidance"}


def _depth(value: object) -> int:
    """Returns how deep lists and objects are nested; stops counting beyond DEPTH_MAX."""
    level, depth = [value], 0
    while level and depth <= DEPTH_MAX:
        depth += 1
        level = [inner for outer in level for inner in _inside(outer)]
    return depth


def _inside(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _choices(source: str) -> list[str]:
    choices = json.loads(source)
    if not (isinstance(choices, list) and choices):
        raise ValueError("a choice is a list of at least one string")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError("each choice is a non-empty string")
    return choices

"""Writes the grammar that forces an answer to call tools, in the model's own format of calls.

The engine masks tokens that the grammar does not allow. The grammar has this form:
    start: [reasoning] opens call (between call)* closes
    call:  before (arguments that match the tool's schema) after
The strings `opens`, `between`, `closes`, `before` and `after` are the fields of the model's
`CallFrame`. Example of a Hermes model, whose `before` is '<tool_call> {"name": "find",
"arguments": ' and whose `after` is '} </tool_call>':
    <tool_call> {"name": "find", "arguments": {"q": "x"}} </tool_call>
`machine.py` parses a forced answer like any other answer.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.errors import BadRequest
from tandem.models.grammars.text import embedded_schema
from tandem.router.parsers.formats import CallFrame, ReasoningTags, ToolFormat
from tandem.router.parsers.grammar_rules import GrammarRules, terminals_of
from tandem.router.parsers.pair_arguments import types_of

# A function's name in a format without quotes, such as `find` in `<function=find>`. The characters
# that surround the name, such as `>`, must not occur in the name.
_BARE_NAME = re.compile(r"[^\s<>{}\[\]\"]{1,256}")


def write_grammar(
    tools: Sequence[Mapping[str, Any]],
    tool_format: ToolFormat,
    reasoning: ReasoningTags | None,
    *,
    frame: CallFrame,
    added_token_id: Callable[[str], int | None],
    begins_in_reasoning: bool,
    one_call_only: bool,
) -> str:
    """Returns the grammar, in llguidance's variant of Lark.

    Raises BadRequest for a tool that cannot be called.
    """
    grammar = _CallRules(terminals_of(tool_format, reasoning), added_token_id, frame=frame)
    calls = grammar.calls([tool["function"] for tool in tools], one_call_only=one_call_only)
    thought = ""
    if reasoning is not None:
        thought = grammar.thought(reasoning, is_open=begins_in_reasoning)
    return "\n".join([f"start: {thought} {calls}", *grammar.rules])


@dataclass(slots=True, kw_only=True)
class _CallRules(GrammarRules):
    """Writes the grammar's rules for tool calls."""

    frame: CallFrame

    def calls(self, functions: Sequence[Mapping[str, Any]], *, one_call_only: bool) -> str:
        frame = self.frame
        arguments = [self._arguments(f) for f in functions]
        names = [self._written_name(f["name"]) for f in functions]

        def one_of(number: str) -> str:
            calls = [
                f"{self.text(frame.before, name, number)} {wanted} {self.text(frame.after)}"
                for name, wanted in zip(names, arguments, strict=True)
            ]
            return self.rule(" | ".join(calls))

        first = one_of('"0"')
        written = f"{self.text(frame.opens)} {first}"
        if not (one_call_only or frame.is_single):
            further = one_of("/[1-9][0-9]{0,3}/") if "%d" in frame.before else first
            written += f" ({self.text(frame.between)} {further})*"
        return f"{written} {self.text(frame.closes)}"

    def _written_name(self, name: str) -> str:
        if '"%s"' in self.frame.before:
            return json.dumps(name)[1:-1]
        if not _BARE_NAME.fullmatch(name):
            raise _cannot_call(
                name, "this model's format does not allow some characters of its name"
            )
        return name

    def _arguments(self, function: Mapping[str, Any]) -> str:
        name = function["name"]
        is_strict = function.get("strict") is True
        schema = {"type": "object", **(function.get("parameters") or {})}
        if schema["type"] != "object":
            raise _cannot_call(name, "the type of its parameters must be object")
        try:
            if self.frame.pair is not None:
                return self._pairs(schema, self.frame.pair, is_strict=is_strict)
            return self._json(schema, is_strict=is_strict)
        except ValueError as error:
            raise _cannot_call(name, str(error)) from None

    def _pairs(self, schema: dict[str, Any], around: tuple[str, str], *, is_strict: bool) -> str:
        """Returns the rule of arguments that are written as tagged parameters.

        The parameters have the order of the schema. `around` has the strings before and after each
        value, such as `<parameter=%s>` and `</parameter>`. Raises ValueError if the format cannot
        express the schema.
        """
        for keyword in ("$ref", "allOf", "anyOf", "oneOf"):
            if keyword in schema:
                raise ValueError(
                    f"the schema of its parameters has {keyword} at the top level, which this "
                    "model's format of tool calls does not allow; list the parameters in properties"
                )
        required = schema.get("required", [])
        own = schema.get("properties", {})
        if not (isinstance(own, dict) and _are_strings(required)):
            raise ValueError("its parameters are not a valid JSON schema")
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        pairs = []
        for key, wanted in {**dict.fromkeys(required, True), **own}.items():
            if not _BARE_NAME.fullmatch(key):
                raise ValueError(
                    f"this model's format of tool calls does not allow {key[:80]!r} as the name of "
                    "a parameter"
                )
            if types_of(wanted) == {"string"}:
                value = self._string(key, wanted, around[1], is_strict=is_strict)
            else:
                whole = {**wanted, **shared} if isinstance(wanted, dict) else wanted
                value = f"{self._json(whole, is_strict=is_strict)} {self.text(around[1])}"
            pair = f"{self.text(around[0], key)} {value}"
            pairs.append(pair if key in required else f"({pair})?")
        return self.rule(" ".join(pairs) or '""')

    def _string(self, key: str, schema: dict[str, Any], end: str, *, is_strict: bool) -> str:
        """Returns the rule of an unquoted string, followed by the string `end`."""
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is not None:
            if not (_are_strings(values) and values):
                raise ValueError(
                    f"enum or const of the string parameter {key!r} must have only strings"
                )
            return f"{self.rule(' | '.join(map(json.dumps, values)))} {self.text(end)}"
        if is_strict and "pattern" in schema:
            raise ValueError(
                f"the parameter {key!r} has a pattern, which this model's format of tool calls "
                "cannot enforce; remove the pattern, or do not set strict to true"
            )
        least = schema.get("minLength", 0)
        most = schema.get("maxLength", "")
        if not (isinstance(least, int) and (isinstance(most, int) or most == "")):
            raise ValueError(f"minLength and maxLength of the parameter {key!r} must be integers")
        return self.up_to(end, f"/(?s:.{{{least},{most}}})/")

    def _json(self, schema: Any, *, is_strict: bool) -> str:
        return self.rule(f"%json {embedded_schema(schema, is_lenient=not is_strict)}")


def _are_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _cannot_call(name: str, why: str) -> BadRequest:
    return BadRequest(
        f"tools has the function {name[:80]!r}, which tool_choice cannot require: {why}",
        param="tools",
    )

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
from dataclasses import dataclass, field
from typing import Any

from tandem.errors import BadRequest
from tandem.models.grammars.schema import closed, without_nulls
from tandem.models.grammars.text import embedded_schema
from tandem.router.parsers.formats import CallFrame, ReasoningTags, ToolFormat
from tandem.router.parsers.grammar_rules import GrammarRules, terminals_of
from tandem.router.parsers.pair_arguments import types_of

# A function's name in a format without quotes, such as `find` in `<function=find>`. The characters
# that surround the name, such as `>`, must not occur in the name.
_BARE_NAME = re.compile(r"[^\s<>{}\[\]\"]{1,256}")
_WORD = re.compile(r"[\w.-]{1,256}")  # the same in a format with marks such as `=` around names
_SCALARS = ("boolean", "integer", "null", "number")
_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"


def write_grammar(
    tools: Sequence[Mapping[str, Any]],
    tool_format: ToolFormat,
    reasoning: ReasoningTags | None,
    *,
    frame: CallFrame,
    split_at_added: Callable[[str], Sequence[tuple[str, int | None]]],
    begins_in_reasoning: bool,
    one_call_only: bool,
    around_content: Sequence[tuple[str, str]] | None = None,
) -> str:
    """Returns the grammar, in llguidance's variant of Lark.

    With `around_content`, the answer may have the form that `@form` stands for instead of calls.
    Raises BadRequest for a tool that cannot be called.
    """
    grammar = _CallRules(terminals_of(tool_format, reasoning), split_at_added, frame=frame)
    calls = grammar.calls([tool["function"] for tool in tools], one_call_only=one_call_only)
    if around_content is not None:
        calls = f"({calls} | {grammar.form(tool_format, around_content)})"
    thought = ""
    if reasoning is not None:
        thought = grammar.thought(reasoning, is_open=begins_in_reasoning)
    return "\n".join([f"start: {thought} {calls}", *grammar.rules])


def without_limits(tool: Mapping[str, Any], frame: CallFrame) -> dict[str, Any]:
    """Returns a tool for answers that may also be something else than its call. Arguments in JSON
    may then be any object, so that no schema refuses such an answer."""
    function = {"name": tool["function"]["name"]}
    if frame.pair is None:
        return {"function": {**function, "parameters": {"additionalProperties": True}}}
    return {"function": {**function, "parameters": tool["function"].get("parameters")}}


@dataclass(slots=True, kw_only=True)
class _CallRules(GrammarRules):
    """Writes the grammar's rules for tool calls."""

    frame: CallFrame
    # (reference to a definition, text after the value) -> rule of the value
    named: dict[tuple[str, str], str] = field(default_factory=dict)

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

    @property
    def _bare_name(self) -> re.Pattern[str]:
        """The names of functions and parameters that the format can express without quotes."""
        return _WORD if self.frame.between_pairs else _BARE_NAME

    def _written_name(self, name: str) -> str:
        if self.frame.pair is None and '"%s"' in self.frame.before:
            return json.dumps(name)[1:-1]
        if not self._bare_name.fullmatch(name):
            raise _cannot_call(
                name,
                "the name has characters that this model's format of tool calls does not allow",
            )
        return name

    def _arguments(self, function: Mapping[str, Any]) -> str:
        name = function["name"]
        is_strict = function.get("strict") is True
        schema = {"type": "object", **without_nulls(function.get("parameters") or {})}
        if not is_strict:
            schema = closed(schema)
        if schema["type"] != "object":
            raise _cannot_call(name, "the type of the function's parameters must be object")
        try:
            if self.frame.pair is not None:
                return self._pairs(schema, is_strict=is_strict)
            return self._json(schema, is_strict=is_strict)
        except ValueError as error:
            raise _cannot_call(name, str(error)) from None

    def _pairs(self, schema: dict[str, Any], *, is_strict: bool) -> str:
        """Returns the rule of arguments that are written as pairs, such as tagged parameters.

        The parameters have the order of the schema. Raises ValueError if the format cannot express
        the schema.
        """
        for keyword in ("$ref", "allOf", "anyOf", "oneOf"):
            if keyword in schema:
                raise ValueError(
                    f"the schema of the function's parameters has {keyword} at the top level, "
                    "which this model's format of tool calls does not allow. List the "
                    "parameters under properties"
                )
        required = schema.get("required", [])
        own = schema.get("properties", {})
        if not (isinstance(own, dict) and _are_strings(required)):
            raise ValueError("the function's parameters are not a valid JSON schema")
        shared: dict[str, Any] = {
            key: schema[key] for key in ("$defs", "definitions") if key in schema
        }
        pairs = []
        for key, wanted in {**dict.fromkeys(required, True), **own}.items():
            if not self._bare_name.fullmatch(key):
                raise ValueError(
                    f"this model's format of tool calls does not allow {key[:80]!r} as the name of "
                    "a parameter"
                )
            is_text = types_of(wanted) == {"string"} and not self.frame.quotes_values
            opens, end = self.frame.pair_of(key, is_text=is_text)
            if self.frame.nested is not None:
                value = self._nested(key, wanted, end, shared, is_strict=is_strict)
            elif is_text:
                value = self._string(key, wanted, end, is_strict=is_strict)
            else:
                whole = {**wanted, **shared} if isinstance(wanted, dict) else wanted
                value = f"{self._json(whole, is_strict=is_strict)} {self.text(end)}"
            pairs.append((f"{self.text(opens)} {value}", key in required))
        return self._sequence(pairs, self.text(self.frame.between_pairs))

    def _nested(
        self, key: str, schema: Any, end: str, shared: Mapping[str, Any], *, is_strict: bool
    ) -> str:
        """Returns the rule of a value in the frame's notation of nested values, followed by the
        string `end`. `shared` has the definitions that references in `schema` name."""
        if not isinstance(schema, dict):
            schema = {}
        reference = schema.get("$ref")
        if reference is None:
            return self.rule(self._nested_value(key, schema, end, shared, is_strict=is_strict))
        if not isinstance(reference, str):
            raise ValueError(f"$ref of the parameter {key!r} must be a string")
        if (reference, end) not in self.named:  # A definition may refer to itself.
            name = self.named[reference, end] = self.rule("")
            place = len(self.rules) - 1
            target = _definition(reference, shared)
            value = self._nested(key, target, end, shared, is_strict=is_strict)
            self.rules[place] = f"{name}: {value}"
        return self.named[reference, end]

    def _nested_value(
        self,
        key: str,
        schema: dict[str, Any],
        end: str,
        shared: Mapping[str, Any],
        *,
        is_strict: bool,
    ) -> str:
        nested = self.frame.nested
        assert nested is not None
        options = [*_listed(schema, "anyOf"), *_listed(schema, "oneOf")]
        rules = [self._nested(key, one, end, shared, is_strict=is_strict) for one in options]
        values = _listed(schema, "enum") or [schema[k] for k in ("const",) if k in schema]
        rules += [self.text(self.frame.value(value) + end) for value in values]
        for name in () if rules else sorted(types_of(schema)) or ("string", *_SCALARS):
            if name == "string":
                rule = self._string(key, schema, nested.quote + end, is_strict=is_strict)
                rules.append(f"{self.text(nested.quote)} {rule}")
            elif name == "array":
                items = self._items(key, schema, shared, is_strict=is_strict)
                opens, closes = nested.around_array
                rules.append(f"{self.text(opens)} {items} {self.text(closes + end)}")
            elif name == "object":
                pairs = self._nested_pairs(key, schema, shared, is_strict=is_strict)
                opens, closes = nested.around_object
                rules.append(f"{self.text(opens)} {pairs} {self.text(closes + end)}")
            else:
                limits = {word: schema[word] for word in _LIMITS if word in schema}
                number = self._json({"type": name, **limits}, is_strict=is_strict)
                rules.append(f"{number} {self.text(end)}")
        return " | ".join(rules)

    def _nested_pairs(
        self, key: str, schema: dict[str, Any], shared: Mapping[str, Any], *, is_strict: bool
    ) -> str:
        """Returns the rule of the pairs of an object inside a value."""
        assert self.frame.pair is not None
        if schema.get("properties"):
            return self._pairs({**schema, **shared}, is_strict=is_strict)
        opens, closes = self.frame.pair
        if "%s" in closes:  # No grammar can repeat a name that is not in the schema.
            return self._json({"type": "object"}, is_strict=is_strict)
        before, after = opens.split("%s")
        more = schema.get("additionalProperties")
        value = self._nested(key, more, closes, shared, is_strict=is_strict)
        pair = self.rule(f"{self.text(before)} {_ANY_KEY} {self.text(after)} {value}")
        return self.rule(f'{pair} ({self.text(self.frame.between_pairs)} {pair})* | ""')

    def _items(
        self, key: str, schema: Mapping[str, Any], shared: Mapping[str, Any], *, is_strict: bool
    ) -> str:
        """Returns the rule of the items of an array."""
        assert self.frame.nested is not None
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not (isinstance(least, int) and isinstance(most, int | None)):
            raise ValueError(f"minItems and maxItems of the parameter {key!r} must be integers")
        if most == 0:
            return '""'
        opens, closes = self.frame.nested.around_item
        value = self._nested(key, schema.get("items"), closes, shared, is_strict=is_strict)
        item = self.rule(f"{self.text(opens)} {value}")
        further = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        items = f"{item} ({self.text(self.frame.between_pairs)} {item}){further}"
        return self.rule(items if least else f'{items} | ""')

    def _sequence(self, items: Sequence[tuple[str, bool]], separator: str) -> str:
        """Returns the rule of a sequence with separators between its items. The second element of
        an item is True if the item is required."""
        first = rest = '""'  # the rules of all items from one on: with none before it, with some
        for item, is_required in reversed(items):
            alone = self.rule(f"{item} {rest}")
            joined = f"{separator} {item} {rest}"
            first = alone if is_required else self.rule(f"{alone} | {first}")
            rest = self.rule(joined if is_required else f"{joined} | {rest}")
        return first

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
                "this model's format of tool calls cannot enforce the pattern of the "
                f"parameter {key!r}. Remove the pattern, or set strict to false"
            )
        least = schema.get("minLength", 0)
        most = schema.get("maxLength", "")
        if not (isinstance(least, int) and (isinstance(most, int) or most == "")):
            raise ValueError(f"minLength and maxLength of the parameter {key!r} must be integers")
        return self.up_to(end, f"/(?s:.{{{least},{most}}})/")

    def _json(self, schema: Any, *, is_strict: bool) -> str:
        return self.rule(f"%json {embedded_schema(schema, is_lenient=not is_strict)}")


def _definition(reference: str, shared: Mapping[str, Any]) -> Any:
    """Returns the definition that a reference such as "#/$defs/Place" names. Raises ValueError."""
    found: Any = shared
    _, *path = reference.split("/")
    for part in path:
        found = found.get(part) if isinstance(found, Mapping) else None
    if found is None or not path:
        raise ValueError(
            f"the function's parameters refer to {reference[:80]!r}, which is not defined"
        )
    return found


def _listed(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword, [])
    if not isinstance(value, list):
        raise ValueError(f"{keyword} in the function's parameters must be a list")
    return value


def _are_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _cannot_call(name: str, why: str) -> BadRequest:
    return BadRequest(
        f"tools has the function {name[:80]!r}, which tool_choice cannot require: {why}",
        param="tools",
    )

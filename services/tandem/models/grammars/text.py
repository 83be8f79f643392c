"""Turns what a client asks for into one grammar text, which llguidance reads.

llguidance compiles by recursion, and bounds neither its depth nor the work for `multipleOf`. The
checks here refuse both with a clear reason. What they do not foresee meets the limits of the
process that compiles the text first (check.py).
"""

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import reduce
from math import isfinite, lcm
from typing import Any, Literal
from urllib.parse import unquote

import llguidance

from tandem.errors import BadRequest

# "lark" is Tandem's own grammar: no client writes one.
Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "lark"]

SOURCE_BYTES_MAX = 128 << 10
DEPTH_MAX = 100  # of nested brackets in a schema
# Levels of brackets with those of what is referred to: `$ref` in a schema, rules in a grammar. The
# compiler's stack (check.py) holds at least four times as many.
EXPANDED_DEPTH_MAX = 250
VISITS_MAX = 200_000  # of lists and objects in a schema, again for each reference to them
# The compiler visits each remainder of each division, and of the divisions that `allOf` combines:
# 0.2 s in all. A factor of 10 costs nothing.
DIVISORS_MAX = 100_000
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
                return _checked_lark(llguidance.grammar_from("grammar", wanted.source))
            case "lark":
                return _checked_lark(wanted.source)
    except (ValueError, ArithmeticError, RecursionError) as error:
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
    _check_schema(schema)
    # Ours, not the schema's: it must not set the compiler's options.
    return {name: value for name, value in schema.items() if name != "x-guidance"}


def _check_schema(schema: dict[str, Any]) -> list[int]:
    """Returns what it divides by. Raises ValueError for a schema that is too deep, or divides by
    too large numbers."""
    if _depth(schema) > DEPTH_MAX:
        raise ValueError(f"the schema is nested more than {DEPTH_MAX} deep")
    seen: set[int] = set()
    divisors: list[int] = []
    num_visits = 0

    def walk(value: object, depth: int) -> None:
        nonlocal num_visits
        num_visits += 1
        if num_visits > VISITS_MAX:
            raise ValueError("the schema is too large with its references")
        if depth > EXPANDED_DEPTH_MAX:
            raise ValueError(
                f"the schema is nested more than {EXPANDED_DEPTH_MAX} deep with its references"
            )
        for inner in _inside(value):
            if isinstance(inner, dict | list):
                walk(inner, depth + 1)
        if isinstance(value, dict):
            divisors.append(_divisor(value.get("multipleOf")))
            target = _find(schema, value.get("$ref"))
            if target is not None and id(target) not in seen:
                seen.add(id(target))
                walk(target, depth + 1)

    walk(schema, 0)
    _check_divisors(divisors)
    return divisors


def _find(schema: dict[str, Any], reference: object) -> object:
    """Returns what a local reference points at, None if it is no such reference."""
    if not (isinstance(reference, str) and reference.startswith("#")):
        return None
    found: object = schema
    for name in unquote(reference[1:]).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def _divisor(value: object) -> int:
    """Returns the digits of a `multipleOf` without zeros at their end; 1 if it is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 1
    try:
        # The compiler reads it as such, too; a larger integer is none.
        number = float(value)
    except OverflowError:
        return 1
    if not isfinite(number):
        return 1
    digits = Decimal(str(number)).normalize().as_tuple().digits
    return max(1, int("".join(map(str, digits))))


def _check_divisors(divisors: list[int]) -> None:
    work = max(sum(d for d in divisors if d > 1), reduce(_lcm, divisors, 1))
    if work > DIVISORS_MAX:
        raise ValueError(
            "its multipleOf are too large: their digits without zeros at the end may have a sum and"
            f" a least common multiple of {DIVISORS_MAX} at most"
        )


def _lcm(one: int, other: int) -> int:
    return min(lcm(one, other), DIVISORS_MAX + 1)  # else it might have a million digits


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


_LARK_PART = re.compile(
    r"""
    (?P<skip> "(?:[^"\\\n]|\\.)*" | //[^\n]* | /(?:[^/\\\n]|\\.)+/ )
    | ^[ \t]*[?!]?(?P<defined>[A-Za-z_][\w-]*)(?:[ \t]*[\[{(.][^:\n"]*)?[ \t]*:
    | (?P<used>[A-Za-z_][\w-]*) | (?P<opens>[(\[{]) | (?P<closes>[)\]}])
    """,
    re.MULTILINE | re.VERBOSE,
)


def _checked_lark(text: str) -> str:
    """Returns the grammar. Raises ValueError if its rules lead too deep into each other, or if a
    schema in it is refused."""
    divisors: list[int] = []
    for found in re.finditer(r"%json\s*(?={)", text):
        with suppress(json.JSONDecodeError):  # the compiler says what is wrong
            divisors += _check_schema(json.JSONDecoder().raw_decode(text, found.end())[0])
    _check_divisors(divisors)
    rules: dict[str, tuple[int, list[str]]] = {}  # brackets in each, and what it uses
    name, depth = "", 0
    for part in _LARK_PART.finditer(text):
        if part["defined"]:
            name, depth = part["defined"], 0
        brackets, used = rules.setdefault(name, (1, []))
        if part["used"]:
            used.append(part["used"])
        elif part["opens"] or part["closes"]:
            depth += 1 if part["opens"] else -1
            rules[name] = (max(brackets, 1 + depth), used)
    seen: set[str] = set()

    def walk(name: str, depth: int) -> None:
        brackets, used = rules[name]
        if depth + brackets > EXPANDED_DEPTH_MAX:
            raise ValueError(
                f"its rules lead more than {EXPANDED_DEPTH_MAX} deep into each other, which the"
                " compiler's stack does not allow"
            )
        seen.add(name)
        for other in used:
            if other in rules and other not in seen:
                walk(other, depth + brackets)

    for name in rules:
        if name not in seen:
            walk(name, 0)
    return text


def _choices(source: str) -> list[str]:
    choices = json.loads(source)
    if not (isinstance(choices, list) and choices):
        raise ValueError("a choice is a list of at least one string")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError("each choice is a non-empty string")
    return choices

"""Converts a client's response format into one grammar text for llguidance.

llguidance compiles recursively, and limits neither the nesting depth nor the work for `multipleOf`.
The checks in this module limit both and give a clear reason. Before an engine compiles a grammar
text, the router compiles it in a process with limits, which stop other excessive work
(grammar_checker.py).
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
from tandem.models.grammars.schema import reason, rewritten, without_nulls

# "lark" marks grammars that Tandem writes itself; clients cannot send them.
Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "lark"]

SOURCE_BYTES_MAX = 128 << 10
DEPTH_MAX = 100  # maximum nesting depth of a schema
# Maximum nesting depth if the target of a reference counts as nested in the reference. References
# are `$ref` in a schema and rule names in a grammar. The stack of the compiler (grammar_checker.py)
# is large enough for at least four times this depth.
EXPANDED_DEPTH_MAX = 250
# Maximum number of lists and objects in a schema. The target of a `$ref` counts twice: at its place
# in the schema, and once for all references to it.
VISITS_MAX = 200_000
# Neither the sum nor the least common multiple of all `multipleOf` divisors in a schema may exceed
# this. The compiler creates a state for each remainder, for example 7 states for `multipleOf: 7`,
# in at most 0.2 s. Zeros at the end of a divisor need no states, so 700 counts as 7.
DIVISORS_MAX = 100_000
# White space between JSON tokens. It is limited because a small model might never stop writing it.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The format that a completion must have. Error messages contain `field`, the name of the
    request's field that specifies the format."""

    field: str
    kind: Kind
    source: str = ""  # a schema or a list of choices as JSON, a regular expression, or a grammar
    is_lenient: bool = False  # True: unsupported keywords of a schema are ignored.
    # "": the whole completion has the format. Otherwise only a part of the completion has it, and
    # this is the Lark grammar of the completion, in which `@form` stands for the part.
    head: str = ""

    def __post_init__(self) -> None:
        size = len(self.source.encode(errors="replace"))
        if size > SOURCE_BYTES_MAX:
            raise BadRequest(
                f"{self.field} has {size} bytes; it must have at most {SOURCE_BYTES_MAX}",
                param=self.field,
            )


def grammar_text(wanted: StructuredOutput) -> str:
    """Returns the grammar text. Raises BadRequest for an invalid source. Errors that only the
    compiler finds are reported by grammar_checker.py."""
    form = _form_text(wanted)
    if not wanted.head:
        return form
    # llguidance's text for a schema or a regular expression is a JSON list with one grammar. For
    # all other kinds, the text is a Lark grammar.
    is_list = wanted.kind in ("json_object", "json_schema", "regex")
    [grammar] = json.loads(form)["grammars"] if is_list else [{"lark_grammar": form}]
    head = _form_text(StructuredOutput(wanted.field, "lark", wanted.head))
    return json.dumps({"grammars": [{"lark_grammar": head}, {**grammar, "name": "form"}]})


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
                return _checked_lark(_with_rewritten_schemas(wanted.source))
    except (ValueError, ArithmeticError, RecursionError) as error:
        raise refused(wanted.field, str(error)) from None


def refused(field: str, why: str) -> BadRequest:
    """Makes the error for a response format that cannot be used; `why` is shortened to one line."""
    shown = reason(why) or "it is too deeply nested"
    return BadRequest(f"{field} cannot be used: {shown[:300]}", param=field)


def embedded_schema(schema: object, *, is_lenient: bool) -> str:
    """Returns a schema as JSON to embed in a grammar, with the compiler's options added. Raises
    ValueError if `schema` is not a supported schema."""
    options = {"whitespace_pattern": _WHITESPACE, "lenient": is_lenient}
    return json.dumps({**_checked_schema(schema), "x-guidance": options})


def _json_grammar(schema: object, *, lenient: bool) -> str:
    checked = rewritten(without_nulls(_checked_schema(schema)), is_strict=not lenient)
    return llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(checked),
        overrides={"whitespace_pattern": _WHITESPACE, "lenient": lenient},
    )


def _checked_schema(schema: object) -> dict[str, Any]:
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("a schema must be a JSON object")
    _check_schema(schema)
    # A client's schema must not set the compiler's options.
    return {name: value for name, value in schema.items() if name != "x-guidance"}


def _check_schema(schema: dict[str, Any]) -> list[int]:
    """Returns the `multipleOf` divisors in a schema, without trailing zeros. Raises ValueError if
    the schema is nested too deeply, has too many lists and objects (VISITS_MAX), or has too large
    divisors."""
    if _depth(schema) > DEPTH_MAX:
        raise ValueError(f"the schema is nested more than {DEPTH_MAX} levels deep")
    seen: set[int] = set()
    divisors: list[int] = []
    num_visits = 0

    def walk(value: object, depth: int) -> None:
        nonlocal num_visits
        num_visits += 1
        if num_visits > VISITS_MAX:
            raise ValueError(
                f"the schema has more than {VISITS_MAX} lists and objects; the targets of "
                "references count, too"
            )
        if depth > EXPANDED_DEPTH_MAX:
            raise ValueError(
                f"the schema is nested more than {EXPANDED_DEPTH_MAX} levels deep; the levels "
                "in the targets of references count, too"
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
    """Returns the part of the schema to which a local JSON pointer (`#/...`) points; None if
    `reference` is no such pointer or points to nothing."""
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
    """Returns the digits of a `multipleOf` as an integer without trailing zeros; 1 if the value is
    not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 1
    try:
        # The compiler also reads the value as a float, for which an integer may be too large.
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
            "the multipleOf values are too large; use fewer or smaller values. Their sum and "
            f"their least common multiple must be at most {DIVISORS_MAX}. Each value counts "
            "without its decimal point and trailing zeros: 2.5 and 250 count as 25"
        )


def _lcm(one: int, other: int) -> int:
    # Without the limit, the least common multiple might have a million digits.
    return min(lcm(one, other), DIVISORS_MAX + 1)


def _depth(value: object) -> int:
    """Returns the nesting depth of lists and objects, counted up to DEPTH_MAX + 1."""
    level = [value]
    depth = 0
    while level and depth <= DEPTH_MAX:
        depth += 1
        level = [inner for outer in level for inner in _inside(outer)]
    return depth


def _inside(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


_LARK_SCHEMA = re.compile(r"%json\s*(?={)")


def _with_rewritten_schemas(text: str) -> str:
    """Rewrites the schemas that `embedded_schema` has put into a grammar."""
    parts = []
    at = 0
    for found in _LARK_SCHEMA.finditer(text):
        if found.start() < at:
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(text, found.end())
            is_strict = not schema["x-guidance"]["lenient"]
        except (ValueError, KeyError):  # the same characters in the name of a function
            continue
        parts += [text[at : found.end()], json.dumps(rewritten(schema, is_strict=is_strict))]
        at = end
    return "".join((*parts, text[at:]))


_LARK_PART = re.compile(
    r"""
    (?P<skip> "(?:[^"\\\n]|\\.)*" | //[^\n]* | /(?:[^/\\\n]|\\.)+/ )
    | ^[ \t]*[?!]?(?P<defined>[A-Za-z_][\w-]*)(?:[ \t]*[\[{(.][^:\n"]*)?[ \t]*:
    | (?P<used>[A-Za-z_][\w-]*) | (?P<opens>[(\[{]) | (?P<closes>[)\]}])
    """,
    re.MULTILINE | re.VERBOSE,
)


def _checked_lark(text: str) -> str:
    """Returns `text` unchanged. Raises ValueError if its rules are nested too deeply, or if an
    embedded schema is refused."""
    divisors: list[int] = []
    for found in _LARK_SCHEMA.finditer(text):
        with suppress(json.JSONDecodeError):  # The compiler reports invalid JSON.
            divisors += _check_schema(json.JSONDecoder().raw_decode(text, found.end())[0])
    _check_divisors(divisors)
    # Rule name -> (nesting depth of the brackets in the rule, names of rules that the rule uses).
    rules: dict[str, tuple[int, list[str]]] = {}
    name = ""
    depth = 0
    for part in _LARK_PART.finditer(text):
        if part["defined"]:
            name = part["defined"]
            depth = 0
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
                f"the grammar is nested more than {EXPANDED_DEPTH_MAX} levels deep; if a rule "
                "uses another rule, the levels of both count"
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
        raise ValueError("choice must be a list of at least one string")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError("each choice must be a non-empty string")
    return choices

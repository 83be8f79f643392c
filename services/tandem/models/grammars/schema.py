"""Rewrites clients' JSON schemas before they are compiled.

Schemas come from libraries such as pydantic and zod, which write keywords that the compiler refuses
although they restrict nothing, or nothing that a model would break:

  keyword           what happens
  format            removed unless the compiler knows it: it is an annotation (JSON Schema 2020-12,
                    validation 7.2.1)
  propertyNames     removed if it is always true; a list of names becomes `properties`, and a
                    pattern becomes `patternProperties`
  pattern           if the compiler cannot read it: removed, or refused where the client asks for a
  patternProperties strict schema
  minimum, maximum  beyond what the compiler reads, such as the limits of a 64-bit number: removed,
  and exclusive...  or in a strict schema replaced by the largest bound that it reads
  null              a keyword that is null counts as absent, and so do values that restrict nothing
                    (_RESTRICTS_NOTHING)
"""

from collections.abc import Iterable, Mapping
from typing import Any

import llguidance

# formats that llguidance enforces
FORMATS = frozenset(
    (
        *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6"),
        *("uri", "uuid", "unknown"),
    )
)
_SCHEMA = ("additionalProperties", "contains", "items", "not", "if", "then", "else")
_SCHEMA_MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_DEFINITIONS = ("$defs", "definitions")
# Keywords that apply further schemas to the same value.
_COMBINES = frozenset(
    ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else")
) | {"dependentSchemas"}
# Keywords that restrict the properties of an object.
_OF_OBJECTS = frozenset(("properties", "patternProperties", "additionalProperties", "required"))
_TO_DEFINITIONS = tuple(f"#/{keyword}/" for keyword in _DEFINITIONS)
# keyword -> a value of it that restricts nothing, where the compiler refuses the keyword
_RESTRICTS_NOTHING: dict[str, Any] = {
    "uniqueItems": False,
    "unevaluatedProperties": True,
    "unevaluatedItems": True,
    "dependentRequired": {},
}
# Keywords for readers. The descriptions of many tools together would exceed the limit of a grammar.
_FOR_READERS = ("title", "description", "examples", "$comment")
# Keywords whose values are data. In two of them null is a value, too.
_OF_DATA = ("const", "default", "enum", "examples")
_MAY_BE_NULL = ("const", "default")
# keyword of a number -> sign of the bounds that almost every number keeps
_BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
_BOUND_MAX = 1 << 62  # the compiler reads such bounds up to here
# Patterns that every string matches.
_NAMES_ANYTHING = (".*", "^.*$", "")


def rewritten(schema: Any, *, is_strict: bool, properties: tuple[str, ...] = ()) -> Any:
    """Returns the schema as the compiler reads it. `properties` are the names of the properties
    that lead to it. Raises ValueError for an unsupported pattern if `is_strict`."""
    if not isinstance(schema, dict):
        return schema
    made = {
        keyword: value
        for keyword, value in schema.items()
        if keyword not in _RESTRICTS_NOTHING or value != _RESTRICTS_NOTHING[keyword]
    }
    if isinstance(made.get("format"), str) and made["format"] not in FORMATS:
        del made["format"]
    for keyword, sign in _BOUNDS.items():
        if isinstance(bound := made.get(keyword), int | float) and bound * sign > _BOUND_MAX:
            made[keyword] = sign * _BOUND_MAX
            if not is_strict:
                del made[keyword]
    if isinstance(pattern := made.get("pattern"), str) and (why := regex_error(pattern)):
        if is_strict:
            raise _unsupported("pattern", pattern, why, properties)
        del made["pattern"]
    if isinstance(named := made.get("patternProperties"), dict):
        made["patternProperties"] = _readable(made, named, properties, is_strict=is_strict)
    if "propertyNames" in made:
        _replace_property_names(made)

    def inner(part: Any, *names: str) -> Any:
        return rewritten(part, is_strict=is_strict, properties=(*properties, *names))

    for keyword in _SCHEMA:
        if isinstance(made.get(keyword), dict):
            made[keyword] = inner(made[keyword])
    for keyword in _SCHEMA_MAPS:
        if isinstance(parts := made.get(keyword), dict):
            is_named = keyword not in _DEFINITIONS
            made[keyword] = {
                name: inner(part, *((name,) if is_named else ())) for name, part in parts.items()
            }
    for keyword in _SCHEMA_LISTS:
        if isinstance(made.get(keyword), list):
            made[keyword] = [inner(part) for part in made[keyword]]
    return made


def without_nulls(schema: Any) -> Any:
    """Returns the schema without keywords that are null. Some libraries write null for a keyword
    that is not set, such as `"required": null`."""
    if isinstance(schema, list):
        return [without_nulls(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        keyword: value if keyword in _OF_DATA else without_nulls(value)
        for keyword, value in schema.items()
        if value is not None or keyword in _MAY_BE_NULL
    }


def regex_error(pattern: str) -> str:
    """Returns why the compiler cannot read a regular expression; "" if it can."""
    grammar = llguidance.LLMatcher.grammar_from_regex(pattern)
    return reason(llguidance.LLMatcher.validate_grammar(grammar))


def reason(error: str) -> str:
    """Returns an error of the compiler as one line; "" for ""."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    # An error about a regular expression quotes it before it gives the reason.
    return next(
        (line.removeprefix("error: ") for line in lines if line.startswith("error: ")),
        lines[0] if lines else "",
    )


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema in which an object has only the properties that it lists, unless it says
    something else. Without this, a model that must call a function may write any property. Texts
    for readers are left out.

    An object stays open if another schema applies to it as well, because that one may list more
    properties. All stay open if such a schema is a reference into another part of the schema.
    """
    made = {"type": "object", **schema}
    if made.keys().isdisjoint(_COMBINES | {"properties", "additionalProperties"}):
        made["properties"] = {}
    definitions = [part for key in _DEFINITIONS for part in _parts(made.get(key))]
    uses = [made, *definitions]
    are_combined = any(_combines_definitions(part) for part in uses)
    if are_combined and any(map(_refers_inside, uses)):
        return made
    result: dict[str, Any] = _closed(made, may_close=True, may_close_definitions=not are_combined)
    return result


def _closed(schema: Any, *, may_close: bool, may_close_definitions: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    made = {keyword: value for keyword, value in schema.items() if keyword not in _FOR_READERS}
    combines = _COMBINES & made.keys()
    listed = made.get("properties")

    def inner(part: Any, may: bool) -> Any:
        return _closed(part, may_close=may, may_close_definitions=may_close_definitions)

    is_open = {"additionalProperties", "unevaluatedProperties"}.isdisjoint(made)
    if may_close and is_open and isinstance(listed, dict) and not combines:
        required = made.get("required", [])
        if isinstance(required, list) and all(
            isinstance(name, str) and name in listed for name in required
        ):
            made["additionalProperties"] = False
    # The options of `anyOf` are the whole schema of the value if nothing stands beside them.
    is_choice = may_close and len(combines) == 1 and "properties" not in made
    for keyword in _SCHEMA:
        if isinstance(made.get(keyword), dict):
            made[keyword] = inner(made[keyword], keyword not in _COMBINES)
    for keyword in _SCHEMA_MAPS:
        if isinstance(parts := made.get(keyword), dict):
            may = may_close_definitions if keyword in _DEFINITIONS else keyword not in _COMBINES
            made[keyword] = {name: inner(part, may) for name, part in parts.items()}
    for keyword in _SCHEMA_LISTS:
        if isinstance(made.get(keyword), list):
            may = is_choice and keyword != "allOf" if keyword in _COMBINES else True
            made[keyword] = [inner(part, may) for part in made[keyword]]
    return made


def _combines_definitions(schema: Any) -> bool:
    """Returns whether a reference in the schema applies beside other schemas of the same value."""
    if isinstance(schema, list):
        return any(map(_combines_definitions, schema))
    if not isinstance(schema, dict):
        return False
    if "allOf" in schema or (
        "$ref" in schema and (_COMBINES | _OF_OBJECTS) & schema.keys() - {"$ref"}
    ):
        return True
    return any(map(_combines_definitions, schema.values()))


def _refers_inside(schema: Any) -> bool:
    """Returns whether a reference in the schema points to something else than a definition."""
    if isinstance(schema, list):
        return any(map(_refers_inside, schema))
    if not isinstance(schema, dict):
        return False
    target = schema.get("$ref")
    if isinstance(target, str) and not target.startswith(_TO_DEFINITIONS):
        return True
    return any(map(_refers_inside, schema.values()))


def _parts(definitions: object) -> Iterable[Any]:
    return definitions.values() if isinstance(definitions, dict) else ()


def _readable(
    schema: dict[str, Any],
    named: Mapping[str, Any],
    properties: tuple[str, ...],
    *,
    is_strict: bool,
) -> dict[str, Any]:
    """Returns the `patternProperties` whose patterns the compiler can read. If one is left out, the
    schema allows any further property of its kind."""
    kept = {}
    freed = []
    for pattern, part in named.items():
        if why := regex_error(pattern):
            if is_strict:
                raise _unsupported("pattern in patternProperties", pattern, why, properties)
            freed.append(part)
        else:
            kept[pattern] = part
    if freed and schema.get("additionalProperties") is False:
        schema["additionalProperties"] = freed[0] if len(freed) == 1 else {"anyOf": freed}
    return kept


def _replace_property_names(schema: dict[str, Any]) -> None:
    """Removes `propertyNames` from a schema, if it is always true or another keyword says the
    same."""
    rule = schema["propertyNames"]
    others = schema.get("additionalProperties", True)
    own = schema.get("properties", {})
    if rule is True:
        del schema["propertyNames"]
    elif isinstance(rule, dict) and isinstance(own, dict):
        names = rule.get("enum", [rule["const"]] if "const" in rule else None)
        if (
            isinstance(names, list)
            and all(isinstance(name, str) for name in names)
            and "patternProperties" not in schema
        ):
            del schema["propertyNames"]
            schema["properties"] = {name: own.get(name, others) for name in names}
            schema["additionalProperties"] = False
        elif _is_any_name(rule):
            del schema["propertyNames"]
        elif (
            isinstance(pattern := rule.get("pattern"), str)
            and not (own or "patternProperties" in schema or rule.keys() - {"type", "pattern"})
            and not regex_error(pattern)
        ):
            del schema["propertyNames"]
            schema["patternProperties"] = {pattern: others}
            schema["additionalProperties"] = False


def _is_any_name(rule: Mapping[str, Any]) -> bool:
    """Returns whether a schema allows every string."""
    kinds = rule.get("type", "string")
    takes_text = "string" in (kinds if isinstance(kinds, list) else [kinds])
    limits = ("minLength", "maxLength", "format", "enum", "const", *_COMBINES)
    return (
        takes_text
        and rule.get("pattern", "") in _NAMES_ANYTHING
        and not [key for key in limits if key in rule and rule[key] != 0]
    )


def _unsupported(what: str, pattern: str, why: str, properties: tuple[str, ...]) -> ValueError:
    where = f" of the property {'.'.join(properties)[:80]!r}" if properties else ""
    return ValueError(f"the {what} {pattern[:80]!r}{where} is not supported: {why}")

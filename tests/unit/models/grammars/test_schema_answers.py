"""Answers of a random model to schemas of all kinds that llguidance supports are valid.

The long form, `tests/conformance/run_schemas.py`, reads schemas of others from a folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.harness.schema_answers import SchemaAnswers
from tests.tiny_models import make_random_speaker

FEW = {"type": "array", "items": {"type": "integer"}, "maxItems": 3}
SCHEMAS: dict[str, Any] = {
    "any": {},
    "constants": {"enum": ["a", 1, None, True, [1, {"b": 2.5}], 'é\n"\\']},
    "length": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[a-c]{2}-\\d+$", "maxLength": 8},
    "format": {"type": "string", "format": "date-time"},
    "range": {"type": "integer", "minimum": -7, "exclusiveMaximum": 1200},
    "number": {"type": "number", "exclusiveMinimum": 0.5, "maximum": 2},
    "multiple": {"type": "integer", "multipleOf": 5, "minimum": 5, "maximum": 95},
    "union": {"anyOf": [{"type": "null"}, {"type": "boolean"}, FEW]},
    "types": {"type": ["integer", "null"]},
    "all": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"const": "x"}],
        "items": False,
        "minItems": 2,
    },
    "object": {
        "type": "object",
        "properties": {"a": FEW, "b c": {"type": "string", "maxLength": 4}, "d": {}},
        "required": ["b c", "e"],
        "additionalProperties": {"type": "boolean"},
    },
    "patterns": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": {"type": "integer"}},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 2,
    },
    "references": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
    },
}


def test_what_ends_by_stop_is_valid(tmp_path: Path) -> None:
    answers = SchemaAnswers(make_random_speaker(tmp_path), seeds=3, max_tokens=120)
    answers.check(SCHEMAS)
    counts = answers.counts
    assert not counts.invalid, str(counts)
    assert not counts.failed, str(counts)
    assert not counts.refused, str(counts)
    assert counts.ended > 2 * len(SCHEMAS), str(counts)

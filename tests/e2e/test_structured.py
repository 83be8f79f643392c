"""Answers have the form that was asked for, and what cannot have it is refused.

That they are the same whichever way the KV came is in test_exactness.py, and after a migration in
test_migration.py.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest

from tests.harness.client import DEADLINE_S
from tests.harness.cluster import LocalCluster

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
POINT = {"type": "array", "items": {"type": "integer", "maximum": 999}, "maxItems": 3}
UNION = {"anyOf": [{"const": "none"}, {"type": "boolean"}, {"$ref": "#/$defs/point"}]}
SCHEMAS: list[Any] = [PERSON, POINT, {**UNION, "$defs": {"point": POINT}}]


def ask(cluster: LocalCluster, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "Describe Ann, who is 30, as JSON."}]
    body = {"messages": messages, "max_tokens": 120, "temperature": 0, **fields}
    return httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=DEADLINE_S)


def as_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


@pytest.mark.parametrize("drawn", [{}, {"temperature": 1.5, "seed": 3}], ids=["greedy", "drawn"])
def test_what_ends_by_stop_is_valid(cluster: LocalCluster, drawn: dict[str, Any]) -> None:
    num_ended = 0
    for schema in SCHEMAS:
        answer = ask(cluster, response_format=as_format(schema), **drawn)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] == "stop":
            num_ended += 1
            jsonschema.validate(json.loads(choice["message"]["content"]), schema)
    assert num_ended
    cluster.wait_idle()


def test_each_field_gives_its_form(cluster: LocalCluster) -> None:
    forms: list[tuple[dict[str, Any], set[str]]] = [
        ({"guided_choice": ["left", "right"]}, {"left", "right"}),
        ({"guided_regex": "x|yy"}, {"x", "yy"}),
        ({"guided_grammar": 'root ::= "0" | "1"'}, {"0", "1"}),
        ({"regex": "x|yy"}, {"x", "yy"}),
        ({"ebnf": '\n    root ::= "0" | "1"\n    '}, {"0", "1"}),
        ({"guided_json": {"const": 7}, "ignore_eos": True}, {"7"}),
        ({"json_schema": {"const": 7}, "grammar": "", "ignore_eos": True}, {"7"}),
        ({"grammar": 'root ::= "0" | "1"'}, {"0", "1"}),
        ({"response_format": {"type": "json_object", "schema": {"const": 7}}}, {"7"}),
        ({"response_format": {"type": "json_schema", "schema": {"const": 7}}}, {"7"}),
        ({"structured_outputs": {"json": {"const": 7}}, "ignore_eos": True}, {"7"}),
        ({"structured_outputs": {"choice": ["one"]}, "min_tokens": 50}, {"one"}),
        ({"structured_outputs": {"regex": "no"}, "bad_words": ["no"]}, {"no"}),
        ({"structured_outputs": {"choice": ["é\n"]}, "logit_bias": {"2": -100}}, {"é\n"}),
    ]
    for fields, texts in forms:
        choice = ask(cluster, **fields).json()["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"] in texts) == ("stop", True)
    cluster.wait_idle()


def test_a_json_object_needs_no_schema(cluster: LocalCluster) -> None:
    answer = ask(cluster, response_format={"type": "json_object"}, logprobs=True)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    text = choice["message"]["content"]
    assert text.lstrip().startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)


def test_what_cannot_be_followed_is_a_400(cluster: LocalCluster) -> None:
    refused: list[dict[str, Any]] = [
        {"response_format": as_format({"uniqueItems": True})},
        {"response_format": {"type": "json_schema"}},
        {"guided_regex": "("},
        {"ebnf": "root ::= ("},
        {"ebnf": 'root ::= "a"', "regex": "a"},
        {"guided_choice": []},
        {"guided_json": {"enum": ["x" * 1000 for _ in range(1000)]}},
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    ]
    for fields in refused:
        answer = ask(cluster, **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(fields)))
    cluster.wait_idle()


PRIME = {"type": "integer", "multipleOf": 99999989}
CHAIN = "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(2000)), 'r2000: "a"'])
# The compiler is the first that notices how deep these references go.
ABROAD = "http://schemas.test/a#/$defs"
DEEP = {
    "$id": "http://schemas.test/a",
    "$defs": {f"d{i}": {"$ref": f"{ABROAD}/d{i + 1}"} for i in range(1500)} | {"d1500": {}},
    "$ref": f"{ABROAD}/d0",
}
OVERLAPPING = f"start: ({'|'.join(f't{i}' for i in range(700))})+\n" + "\n".join(
    f"t{i}: T{i}\nT{i}: /[a-z ]{{1,{i + 2}}}/" for i in range(700)
)
PARAMETERS = {"type": "object", "properties": {"a": PRIME}}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
HOSTILE: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"response_format": as_format(PRIME)}),
    ("/v1/chat/completions", {"response_format": as_format(DEEP), "n": 4}),
    ("/v1/chat/completions", {"tools": [FUNCTION], "tool_choice": "required"}),
    ("/v1/chat/completions", {"guided_grammar": CHAIN, "n": 4}),
    ("/v1/chat/completions", {"guided_grammar": OVERLAPPING, "n": 4}),
    (
        "/v1/messages",
        {"tools": [{"name": "f", "input_schema": PARAMETERS}], "tool_choice": {"type": "any"}},
    ),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": PRIME}}}),
]


def test_hostile_forms_are_refused_while_others_are_served(cluster: LocalCluster) -> None:
    def describe(number: int) -> tuple[str, str]:
        schema = {**PERSON, "description": str(number)}  # each is compiled anew
        answer = ask(cluster, response_format=as_format(schema), max_tokens=24)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        return choice["finish_reason"], choice["message"]["content"]

    def attack(path: str, fields: dict[str, Any]) -> tuple[int, str]:
        body: dict[str, Any] = {"max_tokens": 20, "model": "SmolLM2-135M-Instruct", **fields}
        message = {"role": "user", "content": "x"}
        body["input" if path.endswith("responses") else "messages"] = [message]
        answer = httpx.post(f"{cluster.url}{path}", json=body, timeout=DEADLINE_S)
        return answer.status_code, answer.text

    alone = describe(0)
    with ThreadPoolExecutor(4) as threads:
        attacks = [threads.submit(attack, *hostile) for hostile in HOSTILE]
        others = [describe(number) for number in range(1, 3)]
        for attacked, (path, _) in zip(attacks, HOSTILE, strict=True):
            status, text = attacked.result()
            assert status == 400, (path, text)
            assert "cannot be used: " in text or "cannot require" in text, (path, text)
    assert others == [alone] * 2
    cluster.wait_idle()

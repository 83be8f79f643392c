"""A real model is made to call tools, over both APIs and with official clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import jsonschema
import openai
import pytest

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.net.rpc.tandem.v1 import inference_pb2 as pb
from tandem.net.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tests.harness.cluster import LocalCluster
from tests.harness.models import HERMES_TEMPLATE, with_template

MODEL = "SmolLM2-135M-Instruct"
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"$ref": "#/$defs/Days"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"Days": {"type": "integer", "minimum": 1, "maximum": 14}},
}
NOTE = {
    "type": "object",
    "properties": {"urgent": {"type": "boolean"}},
    "required": ["urgent"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {"get_weather": CITY, "take_note": NOTE}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
NAMED = {"type": "function", "function": {"name": "take_note"}}
ASKED: list[Any] = [{"role": "user", "content": "Weather in Paris for three days?"}]
SEEDS = (1, 2)


@pytest.fixture(scope="module")
def hermes(
    redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    """A cluster whose model's template takes tools and has Hermes' calls."""
    folder = tmp_path_factory.mktemp("hermes")
    cluster = LocalCluster(redis_server, folder)
    cluster.model = str(with_template(folder / "tiny", HERMES_TEMPLATE))
    try:
        yield cluster.start(prefill=0, decode=1)
    finally:
        cluster.close()


def ask(cluster: LocalCluster, **fields: Any) -> Any:
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none")
    asked = {
        "model": MODEL,
        "messages": ASKED,
        "tools": TOOLS,
        "max_tokens": 120,
        "reasoning_effort": "none",
        **fields,
    }
    return client.chat.completions.create(**asked)


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    assert not choice.message.content
    calls = choice.message.tool_calls
    return [(c.function.name, json.loads(c.function.arguments)) for c in calls]


def joined(stream: Any) -> tuple[list[tuple[str, Any]], str]:
    """Returns the calls of a stream, and why it ended."""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    reason = ""
    for chunk in stream:
        for choice in chunk.choices:
            assert not choice.delta.content
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or ():
                names[call.index] = names.get(call.index, "") + (call.function.name or "")
                arguments[call.index] = arguments.get(call.index, "") + call.function.arguments
    return [(names[i], json.loads(arguments[i])) for i in names], reason


def test_required_is_at_least_one_call_by_its_schema(hermes: LocalCluster) -> None:
    num_whole = 0  # many calls may take more tokens than there are
    for seed in SEEDS:
        fields = {"tool_choice": "required", "seed": seed, "temperature": 1.0}
        choice = ask(hermes, **fields).choices[0]
        if choice.finish_reason == "length":
            continue
        num_whole += 1
        calls = calls_of(choice)
        for name, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[name])
        assert (calls, choice.finish_reason) == (calls, "tool_calls")
        assert joined(ask(hermes, stream=True, **fields)) == (calls, "tool_calls")
    assert num_whole
    hermes.wait_idle()


def test_one_call_if_calls_are_not_parallel(hermes: LocalCluster) -> None:
    for seed in SEEDS:
        fields = {"tool_choice": "required", "seed": seed, "parallel_tool_calls": False}
        choice = ask(hermes, **fields).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert len(calls_of(choice)) == 1


def test_a_named_function_ends_by_stop(hermes: LocalCluster) -> None:
    """OpenAI ends such an answer by stop, too."""
    choice = ask(hermes, tool_choice=NAMED, temperature=0).choices[0]
    [(name, arguments)] = calls_of(choice)
    assert (name, choice.finish_reason) == ("take_note", "stop")
    jsonschema.validate(arguments, NOTE)
    assert joined(ask(hermes, tool_choice=NAMED, temperature=0, stream=True)) == (
        [(name, arguments)],
        "stop",
    )


def test_the_same_over_grpc(hermes: LocalCluster) -> None:
    tools = [json.dumps(tool) for tool in TOOLS]
    chat = pb.Chat(
        messages=[pb.ChatMessage(role="user", content=ASKED[0]["content"])],
        tools=tools,
        tool_choice="required",
        function="take_note",
        reasoning_effort="none",
    )
    asked = pb.GenerateRequest(chat=chat, sampling=pb.SamplingParams(temperature=0), max_tokens=120)
    with grpc.insecure_channel(f"127.0.0.1:{hermes.grpc_port}") as channel:
        answer = list(InferenceStub(channel).Generate(asked))
    pieces = [call for part in answer for call in part.tool_calls]
    assert {(p.index, p.name) for p in pieces if p.name} == {(0, "take_note")}
    jsonschema.validate(json.loads("".join(p.arguments for p in pieces)), NOTE)
    assert answer[-1].finish_reason == "stop"
    over_http = ask(hermes, tool_choice=NAMED, temperature=0).choices[0]
    assert calls_of(over_http) == [
        ("take_note", json.loads("".join(p.arguments for p in pieces))),
    ]


def test_a_call_that_is_cut_ends_by_length(hermes: LocalCluster) -> None:
    for stream in (False, True):
        answer = ask(hermes, tool_choice=NAMED, max_tokens=15, stream=stream)
        choices = [answer.choices[0]] if not stream else [c for a in answer for c in a.choices]
        assert choices[-1].finish_reason == "length"
    hermes.wait_idle()

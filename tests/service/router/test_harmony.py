"""Tool loops and answers of a model in gpt-oss' format, in every API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from tandem.net.rpc.tandem.v1 import inference_pb2 as pb
from tandem.net.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tests.harness.models import with_template
from tests.harness.scripted_worker import saying
from tests.service.router.conftest import RunningRouter

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

EOS = 2
# As gpt-oss' template, it searches a content that is there, names reasoning `thinking`, and takes
# either of both beside a call.
TEMPLATE = """
{%- for m in messages %}
    {%- if 'content' in m and '<|channel|>' in m.content %}{{ raise_exception('tags') }}{% endif %}
    {%- if m.tool_calls %}
        {%- if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}
        {{- '<|channel|>analysis<|message|>' + (m.content or m.thinking or '') + '<|end|>' }}
        {%- for call in m.tool_calls %}
            {{- ' to=functions.' + call.function.name + '<|message|>' }}
            {{- call.function.arguments | tojson + '<|call|>' }}
        {%- endfor %}
    {%- else %}
        {{- m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{{- '<|start|>assistant' if add_generation_prompt }}
{#- tools: #}{{ '' if tools }}
"""
CALL = {"id": "call-1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
FUNCTION = {"name": "now", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
ASKED = {"role": "user", "content": "What time?"}
RESULT = {"role": "tool", "tool_call_id": "call-1", "content": "noon"}
CALLED = ' to=functions.now<|message|>{"a": 1}<|call|>'


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model with another chat template."""
    return with_template(tmp_path_factory.mktemp("model") / "tiny", TEMPLATE.strip())


def says(router: RunningRouter, text: str) -> None:
    """Scripts the next answer, and forgets the requests before it."""
    for worker in router.workers:
        worker.submitted.clear()
    ids = router.tokenizer.encode(text, add_special_tokens=False)
    router.script(saying([*ids, EOS], finish_reason="stop"))


def prompt_of(router: RunningRouter) -> str:
    """Returns the text of the prompt that a worker got since the last `says`."""
    (submit,) = router.submitted
    token_ids = submit.input.token_ids  # type: ignore[attr-defined]
    return router.tokenizer.decode(token_ids, skip_special_tokens=False)


async def post(router: RunningRouter, path: str, body: dict[str, Any]) -> Any:
    answer = await router.http.post(path, json={"model": "tiny", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    ("said", "thought"),
    [
        ({"content": None}, ""),
        ({"content": ""}, ""),
        ({}, ""),
        ({"content": None, "reasoning_content": "Hm."}, "Hm."),
        ({"content": None, "reasoning": "Hm."}, "Hm."),
        ({"thinking": "Hm."}, "Hm."),
        ({"content": "I look.", "reasoning_content": "Hm."}, "Hm.\n\nI look."),
    ],
)
async def test_the_second_turn_of_a_chat(
    router: RunningRouter, said: dict[str, Any], thought: str
) -> None:
    says(router, "<|channel|>final<|message|>Noon.")
    turn = {"role": "assistant", **said, "tool_calls": [CALL]}
    chat = {"messages": [ASKED, turn, RESULT], "tools": [TOOL]}
    answer = await post(router, "/v1/chat/completions", chat)
    assert answer["choices"][0]["message"]["content"] == "Noon."
    assert prompt_of(router) == (
        f"user<|message|>What time?<|end|><|channel|>analysis<|message|>{thought}<|end|>{CALLED}"
        "tool<|message|>noon<|end|><|start|>assistant"
    )


async def test_the_second_turn_in_the_other_apis(router: RunningRouter) -> None:
    wanted = f"<|channel|>analysis<|message|>Hm.<|end|>{CALLED}"
    says(router, "Noon.")
    use = {"type": "tool_use", "id": "call-1", "name": "now", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "call-1", "content": "noon"}
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    turns = [
        ASKED,
        {"role": "assistant", "content": [thinking, use]},
        {"role": "user", "content": [result]},
    ]
    tool = {"name": "now", "input_schema": FUNCTION["parameters"]}
    body = {"messages": turns, "tools": [tool], "max_tokens": 9}
    assert (await post(router, "/v1/messages", body))["content"][0]["text"] == "Noon."
    assert wanted in prompt_of(router)

    says(router, "Noon.")
    items = [
        {"role": "user", "content": "What time?"},
        {"type": "reasoning", "summary": [], "content": [{"text": "Hm."}]},
        {"type": "function_call", "call_id": "call-1", "name": "now", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "call-1", "output": "noon"},
    ]
    body = {"input": items, "tools": [{"type": "function", **FUNCTION}]}
    answer = await post(router, "/v1/responses", body)
    assert answer["output"][0]["content"][0]["text"] == "Noon."
    assert wanted in prompt_of(router)

    says(router, "Noon.")
    call = pb.ToolCall(id="call-1", name="now", arguments='{"a": 1}')
    chat = pb.Chat(
        messages=[
            pb.ChatMessage(role="user", content="What time?"),
            pb.ChatMessage(role="assistant", reasoning="Hm.", tool_calls=[call]),
            pb.ChatMessage(role="tool", content="noon", tool_call_id="call-1"),
        ],
        tools=[json.dumps(TOOL)],
    )
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.router.grpc_port}") as channel:
        stream = InferenceStub(channel).Generate(pb.GenerateRequest(chat=chat), timeout=20)
        assert "".join([message.text async for message in stream]) == "Noon."
    assert wanted in prompt_of(router)


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("Noon, I think.", "Noon, I think.", ""),
        ("<|channel|>final Noon, I think.", " Noon, I think.", ""),
        ("<|channel|>analysis Hm, so.<|end|><|channel|>final<|message|>Noon.", "Noon.", "Hm, so."),
    ],
)
async def test_a_stream_without_marks_loses_nothing(
    router: RunningRouter, text: str, content: str, reasoning: str
) -> None:
    says(router, text)
    body = {"model": "tiny", "messages": [ASKED], "stream": True}
    stream = await router.openai.chat.completions.create(**body)
    deltas = [choice.delta async for chunk in stream for choice in chunk.choices]
    assert "".join(d.content or "" for d in deltas) == content
    thoughts = [getattr(d, "reasoning_content", None) or "" for d in deltas]
    assert "".join(thoughts) == reasoning


async def test_an_answer_goes_on_within_a_message(router: RunningRouter) -> None:
    says(router, " noon.")
    turn = {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}
    body = {"messages": [ASKED, turn], "continue_final_message": True}
    answer = await post(router, "/v1/chat/completions", body)
    assert prompt_of(router).endswith("assistant<|message|>It is")
    assert answer["choices"][0]["message"]["content"] == " noon."

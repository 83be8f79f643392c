# /// script
# dependencies = ["anthropic"]
# ///
"""Anthropic's own client: messages, streams, tools, counts of tokens and lists of models."""

from __future__ import annotations

import asyncio

import anthropic
from checks import KEY, MODEL, QUESTION, URL, run

client = anthropic.Anthropic(base_url=URL.removesuffix("/v1"), api_key=KEY)
ASKED = [{"role": "user", "content": QUESTION}]
WEATHER = {
    "name": "get_weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def lists_models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def sends() -> None:
    made = client.messages.create(model=MODEL, messages=ASKED, max_tokens=40)
    assert made.content[0].text
    assert made.usage.output_tokens > 1


def streams() -> None:
    with client.messages.stream(model=MODEL, messages=ASKED, max_tokens=40) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_message().content[0].text == text


def is_async() -> None:
    async def asked() -> str:
        own = anthropic.AsyncAnthropic(base_url=URL.removesuffix("/v1"), api_key=KEY)
        async with own:
            made = await own.messages.create(model=MODEL, messages=ASKED, max_tokens=40)
            return made.content[0].text

    assert asyncio.run(asked())


def calls_tools() -> None:
    more = {"model": MODEL, "tools": [WEATHER]}
    asked = {"messages": ASKED, "tool_choice": {"type": "any"}, "max_tokens": 200}
    made = client.messages.create(**asked, **more)
    call = next(block for block in made.content if block.type == "tool_use")
    assert set(call.input) == {"city"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    told = [
        *ASKED,
        {"role": "assistant", "content": made.content},
        {"role": "user", "content": [result]},
    ]
    assert client.messages.create(messages=told, max_tokens=20, **more).content


def counts() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=ASKED)
    made = client.messages.create(model=MODEL, messages=ASKED, max_tokens=1)
    cached = made.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == made.usage.input_tokens + cached


def refuses() -> None:
    try:
        client.messages.create(model="another", messages=ASKED, max_tokens=1)
    except anthropic.NotFoundError:
        return
    raise AssertionError("another model was served")


run(lists_models, sends, streams, is_async, calls_tools, counts, refuses)

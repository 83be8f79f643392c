# /// script
# dependencies = ["litellm", "mcp"]
# ///
"""LiteLLM: chats, streams, completions, tools, structured output, embeddings, Anthropic's API.

LiteLLM imports mcp for tools and responses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
from checks import KEY, MODEL, QUESTION, URL, run
from pydantic import BaseModel, ConfigDict, Field

HERE: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY}
ASKED = [{"role": "user", "content": QUESTION}]
MORE = {"temperature": 0, "max_tokens": 60}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=20)
    age: int


def chats() -> None:
    answer = litellm.completion(**HERE, messages=ASKED, **MORE)
    assert "Paris" in answer.choices[0].message.content
    assert answer.usage.completion_tokens > 1


def streams() -> None:
    stream = litellm.completion(**HERE, messages=ASKED, stream=True, **MORE)
    text = "".join(c.choices[0].delta.content or "" for c in stream)
    assert "Paris" in text


def is_async() -> None:
    answer = asyncio.run(litellm.acompletion(**HERE, messages=ASKED, **MORE))
    assert "Paris" in answer.choices[0].message.content


def batches() -> None:
    answers = litellm.batch_completion(**HERE, messages=[ASKED, ASKED], **MORE)
    assert len({a.choices[0].message.content for a in answers}) == 1


def calls_tools() -> None:
    answer = litellm.completion(
        **HERE, messages=ASKED, tools=[WEATHER], tool_choice="required", **MORE
    )
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert "city" in json.loads(call.function.arguments)


def structures() -> None:
    answer = litellm.completion(
        **HERE, messages=[{"role": "user", "content": "Ann is 30."}], response_format=Person, **MORE
    )
    Person.model_validate_json(answer.choices[0].message.content)


def completes() -> None:
    here = {**HERE, "model": f"text-completion-openai/{MODEL}"}
    answer = litellm.text_completion(**here, prompt="The capital of France is", **MORE)
    assert answer.choices[0].text


def embeddings() -> None:
    made = litellm.embedding(**HERE, input=["one", "two"])
    assert len(made.data) == 2


def responses() -> None:
    answer = litellm.responses(**HERE, input=QUESTION, max_output_tokens=60)
    assert answer.output


def messages() -> None:
    here = {"model": f"anthropic/{MODEL}", "api_base": URL.removesuffix("/v1"), "api_key": KEY}
    answer = litellm.completion(**here, messages=ASKED, **MORE)
    assert "Paris" in answer.choices[0].message.content


run(
    *(chats, streams, is_async, batches, calls_tools),
    *(structures, completes, embeddings, responses, messages),
)

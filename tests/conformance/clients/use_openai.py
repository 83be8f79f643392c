# /// script
# dependencies = ["openai"]
# ///
"""OpenAI's own client: chats, streams, completions, parsed answers, responses and embeddings."""

from __future__ import annotations

import asyncio

import openai
from checks import KEY, MODEL, QUESTION, URL, run
from pydantic import BaseModel, ConfigDict, Field

client = openai.OpenAI(base_url=URL, api_key=KEY)
ASKED = [{"role": "user", "content": QUESTION}]


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=20)
    age: int


def lists_models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def chats() -> None:
    made = client.chat.completions.create(model=MODEL, messages=ASKED, temperature=0, max_tokens=40)
    assert "Paris" in made.choices[0].message.content


def streams() -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=ASKED, temperature=0, max_tokens=40
    ) as stream:
        kinds = [event.type for event in stream]
        assert "Paris" in stream.get_final_completion().choices[0].message.content
    assert kinds.count("content.delta") > 2


def is_async() -> None:
    async def asked() -> str:
        async with openai.AsyncOpenAI(base_url=URL, api_key=KEY) as own:
            made = await own.completions.create(
                model=MODEL, prompt="The capital of France is", max_tokens=8, temperature=0
            )
            return made.choices[0].text

    assert "Paris" in asyncio.run(asked())


def parses() -> None:
    made = client.chat.completions.parse(
        model=MODEL, messages=ASKED, max_tokens=100, temperature=0, response_format=Person
    )
    assert isinstance(made.choices[0].message.parsed, Person)


def parses_calls() -> None:
    made = client.chat.completions.parse(
        model=MODEL,
        messages=ASKED,
        max_tokens=100,
        temperature=0,
        tools=[openai.pydantic_function_tool(Person)],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    (call,) = made.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Person)


def responds() -> None:
    made = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=40)
    assert "Paris" in made.output_text


def streams_responses() -> None:
    with client.responses.stream(
        model=MODEL, input=QUESTION, temperature=0, max_output_tokens=40
    ) as stream:
        assert sum(event.type == "response.output_text.delta" for event in stream) > 2
        assert "Paris" in stream.get_final_response().output_text


def parses_responses() -> None:
    made = client.responses.parse(
        model=MODEL, input="Ann is 30.", text_format=Person, max_output_tokens=100, temperature=0
    )
    assert isinstance(made.output_parsed, Person)


def embeds() -> None:
    made = client.embeddings.create(model=MODEL, input=["one", "two"])
    assert len(made.data[0].embedding) == len(made.data[1].embedding) > 100


def refuses() -> None:
    try:
        client.chat.completions.create(model="another", messages=ASKED)
    except openai.NotFoundError:
        return
    raise AssertionError("another model was served")


run(
    *(lists_models, chats, streams, is_async, parses, parses_calls),
    *(responds, streams_responses, parses_responses, embeds, refuses),
)

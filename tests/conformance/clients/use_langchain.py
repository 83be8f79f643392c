# /// script
# dependencies = ["langchain-openai"]
# ///
"""LangChain: chats, streams, batches, tools, structured output, embeddings."""

from __future__ import annotations

import asyncio

from checks import KEY, MODEL, QUESTION, URL, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, ConfigDict, Field

chat = ChatOpenAI(base_url=URL, api_key=KEY, model=MODEL, temperature=0, max_tokens=60)


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=20)
    age: int


class Weather(BaseModel):
    """The place of a report."""

    model_config = ConfigDict(extra="forbid")

    city: str = Field(max_length=20)


@tool(args_schema=Weather)
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


def chats() -> None:
    answer = chat.invoke(QUESTION)
    assert "Paris" in answer.content
    assert answer.usage_metadata["output_tokens"] > 1


def streams() -> None:
    pieces = list(chat.stream(QUESTION))
    assert len(pieces) > 2
    assert "".join(p.content for p in pieces) == chat.invoke(QUESTION).content


def batches() -> None:
    answers = chat.batch([QUESTION, "Say hello."])
    assert len(answers) == 2
    assert answers[0].content == chat.invoke(QUESTION).content


def is_async() -> None:
    assert "Paris" in asyncio.run(chat.ainvoke(QUESTION)).content


def calls_tools() -> None:
    bound = chat.bind_tools([get_weather], tool_choice="get_weather", strict=True)
    asked = HumanMessage("What is the weather in Paris?")
    answer = bound.invoke([asked])
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather"
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    assert chat.invoke([asked, answer, result]).content
    assert bound.bind(tool_choice="auto").invoke([asked]) is not None


def streams_calls() -> None:
    bound = chat.bind_tools([get_weather], tool_choice="required", strict=True)
    whole = None
    for piece in bound.stream("What is the weather in Paris?"):
        whole = piece if whole is None else whole + piece
    assert whole is not None
    assert whole.tool_calls[0]["name"] == "get_weather"


def structures_by_schema() -> None:
    found = chat.with_structured_output(Person, method="json_schema").invoke("Ann is 30.")
    assert isinstance(found, Person)


def structures_by_function() -> None:
    found = chat.with_structured_output(Person, method="function_calling").invoke("Ann is 30.")
    assert isinstance(found, Person)


def structures_by_json() -> None:
    asked = chat.with_structured_output(method="json_mode")
    assert isinstance(asked.invoke('Answer with JSON such as {"name": "Ann"}.'), dict)


def responses() -> None:
    by_responses = ChatOpenAI(
        base_url=URL, api_key=KEY, model=MODEL, max_tokens=60, use_responses_api=True
    )
    assert by_responses.invoke(QUESTION).text
    found = by_responses.with_structured_output(Person).invoke("Ann is 30.")
    assert isinstance(found, Person)


def embeddings() -> None:
    sent_as_text = {"check_embedding_ctx_length": False}
    made = OpenAIEmbeddings(base_url=URL, api_key=KEY, model=MODEL, **sent_as_text)
    first, second = made.embed_documents(["one", "two"])
    assert len(first) == len(second) > 100


run(
    *(chats, streams, batches, is_async, calls_tools, streams_calls),
    *(structures_by_schema, structures_by_function, structures_by_json, responses, embeddings),
)

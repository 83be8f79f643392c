# /// script
# dependencies = ["llama-index-llms-openai-like", "llama-index-embeddings-openai-like"]
# ///
"""LlamaIndex: completions, chats, streams, tools, structured output and embeddings."""

import asyncio
from typing import Literal

from checks import KEY, MODEL, QUESTION, URL, run
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict, Field

llm = OpenAILike(
    model=MODEL,
    api_base=URL,
    api_key=KEY,
    is_chat_model=True,
    is_function_calling_model=True,
    temperature=0,
    max_tokens=100,
)
ASKED = [ChatMessage(role="user", content=QUESTION)]


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=20)
    age: int


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


def completes() -> None:
    plain = OpenAILike(model=MODEL, api_base=URL, api_key=KEY, is_chat_model=False, max_tokens=20)
    assert plain.complete("The capital of France is").text


def chats() -> None:
    assert "Paris" in llm.chat(ASKED).message.content


def streams() -> None:
    pieces = list(llm.stream_chat(ASKED))
    assert "".join(p.delta for p in pieces) == llm.chat(ASKED).message.content


def is_async() -> None:
    assert "Paris" in asyncio.run(llm.achat(ASKED)).message.content


def calls_tools() -> None:
    tools = [FunctionTool.from_defaults(get_weather)]
    answer = llm.chat_with_tools(tools, "What is the weather in Paris?", tool_required=True)
    calls = llm.get_tool_calls_from_response(answer)
    assert calls[0].tool_name == "get_weather"


def structures() -> None:
    found = llm.as_structured_llm(Person).complete("Ann is 30.")
    assert isinstance(found.raw, Person)


def embeddings() -> None:
    made = OpenAILikeEmbedding(model_name=MODEL, api_base=URL, api_key=KEY)
    assert len(made.get_text_embedding("one")) > 100


run(completes, chats, streams, is_async, calls_tools, structures, embeddings)

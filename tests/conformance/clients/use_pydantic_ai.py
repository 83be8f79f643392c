# /// script
# dependencies = ["pydantic-ai-slim[openai]"]
# ///
"""Pydantic AI: agents with text, typed output, tools and streams, over chats and responses."""

from __future__ import annotations

import asyncio

from checks import KEY, MODEL, QUESTION, URL, run
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=URL, api_key=KEY)
chat = OpenAIChatModel(MODEL, provider=provider)
SETTINGS = {"temperature": 0.0, "max_tokens": 200}


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=20)
    age: int


def chats() -> None:
    made = Agent(chat).run_sync(QUESTION, model_settings=SETTINGS)
    assert "Paris" in made.output
    assert made.all_messages()


def streams() -> None:
    async def joined() -> str:
        async with Agent(chat).run_stream(QUESTION, model_settings=SETTINGS) as stream:
            return "".join([piece async for piece in stream.stream_text(delta=True)])

    assert "Paris" in asyncio.run(joined())


def structures_natively() -> None:
    agent = Agent(chat, output_type=NativeOutput(Person))
    made = agent.run_sync("Ann is 30.", model_settings=SETTINGS)
    assert isinstance(made.output, Person)


def structures_by_tool() -> None:
    agent = Agent(chat, output_type=ToolOutput(Person))
    made = agent.run_sync("Ann is 30.", model_settings=SETTINGS)
    assert isinstance(made.output, Person)


def responses() -> None:
    model = OpenAIResponsesModel(MODEL, provider=provider)
    assert Agent(model).run_sync(QUESTION, model_settings=SETTINGS).output


run(chats, streams, structures_natively, structures_by_tool, responses)

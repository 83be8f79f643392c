# /// script
# dependencies = ["instructor"]
# ///
"""Instructor: a typed answer in each of the modes for servers of OpenAI's API."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import instructor
import openai
from checks import KEY, MODEL, URL, run
from pydantic import BaseModel, ConfigDict, Field

ASKED = [{"role": "user", "content": "Ann is 30 years old. Answer with her name and age."}]


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


class Note(BaseModel):
    """A note. A mode without a schema on the wire can make it of any JSON."""

    text: str = ""


# Modes that send no schema: the model alone decides what its JSON has.
_WITHOUT_SCHEMA = ("JSON", "MD_JSON")


def _client(mode: instructor.Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=URL, api_key=KEY), mode=mode)


def _answers(mode: instructor.Mode) -> None:
    wanted = Note if mode.name in _WITHOUT_SCHEMA else Person
    more: dict[str, Any] = {"max_tokens": 200, "temperature": 0}
    if mode.name == "MD_JSON":  # nothing but words asks for JSON: the grammar stands for a model
        more["extra_body"] = {"guided_json": Note.model_json_schema()}
    made = _client(mode).create(
        model=MODEL, messages=ASKED, response_model=wanted, max_retries=0, **more
    )
    assert isinstance(made, wanted)


def parallel_tools() -> None:
    client = _client(instructor.Mode.PARALLEL_TOOLS)
    made = client.create(
        model=MODEL,
        messages=ASKED,
        response_model=Iterable[Person],
        max_tokens=300,
        max_retries=0,
        temperature=0,
        # The mode itself says auto: SmolLM2 would call nothing, and calls without end if it must.
        extra_body={"tool_choice": "required", "parallel_tool_calls": False},
    )
    assert all(isinstance(one, Person) for one in made)


def partial_stream() -> None:
    client = _client(instructor.Mode.TOOLS)
    pieces = list(
        client.create_partial(
            model=MODEL, messages=ASKED, response_model=Person, max_tokens=200, max_retries=0
        )
    )
    assert pieces[-1].age is not None


def _check(mode: instructor.Mode) -> functools.partial[None]:
    check = functools.partial(_answers, mode)
    check.__name__ = f"mode_{mode.name}"  # type: ignore[attr-defined]
    return check


MODES = [
    getattr(instructor.Mode, name)
    for name in ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "MD_JSON", "RESPONSES_TOOLS")
    if hasattr(instructor.Mode, name)
]
run(*map(_check, MODES), parallel_tools, partial_stream)

"""Tools, calls and results as words, for templates that know none of them."""

from __future__ import annotations

import json

from tandem.router.request.conversation import Conversation, Message, ToolCall
from tandem.router.request.prompt.told_tools import with_described_results, with_described_tools

WEATHER = {"type": "function", "function": {"name": "weather", "description": "Wetter für Orte"}}
ASKED = Message("user", "Rome?")


def test_tools_stand_in_the_system_message() -> None:
    chat = with_described_tools(Conversation((ASKED,), tools=(WEATHER,)))
    system, asked = chat.messages
    assert (system.role, asked) == ("system", ASKED)
    assert system.content is not None
    assert json.loads(system.content.splitlines()[-1]) == WEATHER["function"]
    assert "Wetter für Orte" in system.content
    assert chat.tools == (WEATHER,)


def test_a_system_message_keeps_its_own_text() -> None:
    own = Message("system", "Be kind.")
    (system, _) = with_described_tools(Conversation((own, ASKED), tools=(WEATHER,))).messages
    assert system.content is not None
    assert system.content.startswith("Be kind.\n\nYou may call functions.")


def test_calls_and_results_are_told_in_order() -> None:
    call = ToolCall("call-1", "weather", {"city": "Rome"})
    called = Message("assistant", None, tool_calls=(call,))
    result = Message("tool", "18 degrees", tool_call_id="call-1")
    chat = with_described_tools(Conversation((ASKED, called, result)))
    assert chat.messages[1].content == '[{"name": "weather", "arguments": {"city": "Rome"}}]'
    assert not chat.messages[1].tool_calls
    assert (chat.messages[2].role, chat.messages[2].content) == (
        "user",
        "Result of the call call-1:\n18 degrees",
    )


def test_without_a_system_role_the_first_message_of_the_user_tells() -> None:
    chat = Conversation((Message("assistant", "Hi"), ASKED), tools=(WEATHER,))
    first, asked = with_described_tools(chat, takes_system=False).messages
    assert (first.content, asked.role) == ("Hi", "user")
    assert asked.content is not None
    tools, _, question = asked.content.rpartition("\n\n")
    assert question == "Rome?"
    assert json.loads(tools.splitlines()[-1]) == WEATHER["function"]


def test_results_and_what_the_user_adds_are_one_message() -> None:
    calls = tuple(ToolCall(f"call-{n}", "weather", {}) for n in "12")
    results = (Message("tool", "18", tool_call_id=f"call-{n}") for n in "12")
    messages = (ASKED, Message("assistant", None, tool_calls=calls), *results, Message("user", "?"))
    chat = with_described_tools(Conversation(messages, tools=(WEATHER,)), takes_system=False)
    assert [message.role for message in chat.messages] == ["user", "assistant", "user"]
    told = "Result of the call call-1:\n18\n\nResult of the call call-2:\n18\n\n?"
    assert chat.messages[-1].content == told


def test_a_chat_without_tools_is_as_it_was() -> None:
    chat = Conversation((ASKED, Message("tool", "18 degrees")))
    assert with_described_tools(chat) is chat


def test_results_alone_are_told_where_calls_are_shown() -> None:
    call = ToolCall("call-1", "weather", {})
    called = Message("assistant", "Let me look.", tool_calls=(call,))
    result = Message("tool", "18 degrees", tool_call_id="call-1")
    chat = with_described_results(Conversation((ASKED, called, result, ASKED), tools=(WEATHER,)))
    told = Message("user", "Result of the call call-1:\n18 degrees\n\nRome?")
    assert chat.messages == (ASKED, called, told)
    assert chat.tools == (WEATHER,)

from __future__ import annotations

import time

import pytest

from tandem.router.request.conversation import Conversation, Message
from tandem.router.request.request import ClientRequest
from tandem.router.request.varying_lines import VARYING_LINES, move_lines, with_lines_moved

TOOL = {"type": "function", "function": {"name": "read"}}


def moved(system: str, *later: Message) -> list[str | None]:
    chat = Conversation((Message("system", system), *later), tools=(TOOL,))
    return [message.content for message in move_lines(chat).messages]


@pytest.mark.parametrize("form", VARYING_LINES)
def test_a_line_with_the_date_follows_the_system_prompt(form: str) -> None:
    line = form.format(when="Mon Nov 30 2026")
    contents = moved(f"You help.\n  {line}\n</env>", Message("user", "Hi"), Message("user", "Ho"))
    assert contents == ["You help.\n</env>", f"{line}\n\nHi", "Ho"]


def test_the_prompts_of_two_days_begin_alike() -> None:
    days = [
        moved(f"<env>\nToday's date: 2026-11-{day}\n</env>\nBe brief.", Message("user", "Hi"))
        for day in (29, 30)
    ]
    assert days[0][0] == days[1][0]
    assert days[0][1] != days[1][1]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The current time is unknown",  # tells nothing
        "Say that today is 2026-11-30",  # not a whole line
        "Current date: 2026-11-30 " + "x" * 100,
    ],
)
def test_other_lines_stay(text: str) -> None:
    assert moved(text, Message("user", "Hi")) == [text, "Hi"]


def test_a_chat_without_a_user_message_stays() -> None:
    assert moved("Today is 1 May") == ["Today is 1 May"]
    answer = Message("assistant", "Hi")
    assert moved("Today is 1 May", answer, Message("user", "x"))[0] == "Today is 1 May"


def test_lists_of_parts_keep_their_parts() -> None:
    chat = Conversation(
        (
            Message.of_parts("system", ["Be brief.", "Today is 1 May\nBe kind."]),
            Message.of_parts("user", ["one", "two"]),
        )
    )
    system, user = move_lines(chat).messages
    assert system.parts == ("Be brief.", "Be kind.")
    assert user.parts == ("Today is 1 May\n\none", "two")


def test_what_is_pinned_stays_a_prefix() -> None:
    system = Message("system", "Today is 1 May\nBe brief.")
    request = ClientRequest(
        Conversation((system, Message("user", "Hi"))),
        pinned_chat=Conversation((system, Message("user", ""))),
    )
    changed = with_lines_moved(request)
    assert isinstance(changed.prompt, Conversation)
    assert changed.pinned_chat is not None
    assert changed.pinned_chat.messages[0] == changed.prompt.messages[0]
    assert with_lines_moved(ClientRequest("Today is 1 May")).prompt == "Today is 1 May"


def test_long_texts_take_little_time() -> None:
    began = time.process_time()
    moved("\n".join(["Today is " + "x" * 39] * 20_000) + "current date: " * 50_000)
    assert time.process_time() - began < 2.0

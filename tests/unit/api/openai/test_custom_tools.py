"""Tools of the type `custom`, whose only argument is text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.api.openai.tools import (
    CallChunks,
    arguments_of,
    arguments_of_input,
    call_body,
    input_of,
)
from tandem.router.parsers.machine import CallDelta

TEXT = 'a "b" \\ \n\u00e9\U0001f642 {"input": "x"}'


@pytest.mark.parametrize("ascii_only", [True, False])
def test_the_input_of_a_call_that_is_cut_is_its_text_so_far(ascii_only: bool) -> None:
    arguments = json.dumps({"input": TEXT}, ensure_ascii=ascii_only)
    assert input_of(arguments) == TEXT
    begin = arguments.index("a ")
    last = ""
    for end in range(begin, len(arguments)):
        text = input_of(arguments[:end])
        assert TEXT.startswith(text), arguments[:end]
        assert len(text) >= len(last)
        last = text
    assert last == TEXT


def test_malformed_arguments_are_the_input() -> None:
    for arguments in ("", "patch", '{"text": "a"}', '{"input": 5}', '{"input": "a"} b', "[]"):
        assert input_of(arguments) == arguments
    assert input_of('{"input": "a\\ud800"}') == "a"
    assert arguments_of('{"a": "\\ud83d\\ude42"}') == {"a": "\U0001f642"}
    assert arguments_of('{"a": "\\ud83d"}') == {"a": "\ufffd"}
    assert input_of(arguments_of_input(TEXT)) == TEXT


def test_a_custom_call_streams_in_one_piece() -> None:
    chunks = CallChunks({"patch"})
    deltas = [
        CallDelta(0, "", "a", "f"),
        CallDelta(0, '{"x": 1}'),
        CallDelta(1, '{"inp', "b", "patch"),
        CallDelta(1, 'ut": "te'),
        CallDelta(1, 'xt"}'),
        CallDelta(2, "{}", "c", "f"),
        CallDelta(3, '{"input": "cut', "d", "patch"),
    ]
    made: list[dict[str, Any]] = []
    for index, delta in enumerate(deltas):
        made += chunks.push([delta], is_last=index == len(deltas) - 1)
    assert [(one["index"], one.get("type")) for one in made] == [
        (0, "function"),
        (0, None),
        (1, "custom"),
        (2, "function"),
        (3, "custom"),
    ]
    assert made[2] == {
        "index": 1,
        **call_body(CallDelta(1, '{"input": "text"}', "b", "patch"), {"patch"}),
    }
    assert made[2]["custom"] == {"name": "patch", "input": "text"}
    assert made[4]["custom"] == {"name": "patch", "input": "cut"}

"""Answers of gpt-oss, which are rows of messages."""

from __future__ import annotations

import json

import pytest

from tests.unit.router.parsers.test_machine import PARIS, Said, cut, harmony, make, whole

HARMONY = [
    (
        "<|channel|>analysis<|message|>The final answer: 1 < 2.<|end|><|start|>assistant"
        "<|channel|>final<|message|>Yes, 2 is more.",
        Said("The final answer: 1 < 2.", "Yes, 2 is more.", []),
    ),
    ("<|channel|>final<|message|>An analysis.", Said("", "An analysis.", [])),
    ("<|message|>Hi", Said("", "Hi", [])),
    (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "Let me look.<|end|><|start|>assistant" + harmony(PARIS),
        Said("Hm.", "Let me look.", [(PARIS[0], json.dumps(PARIS[1]))]),
    ),
    (
        "<|channel|>commentary to=functions.now<|message|>{}<|end|><|start|>assistant"
        "<|channel|>final<|message|>Noon.",
        Said("", "Noon.", [("now", "{}")]),
    ),
    (
        " to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        Said("", "", [("now", "{}")]),
    ),
    ("<|channel|>analysis<|message|>Hm", Said("Hm", "", [])),
    ("<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|chan", Said("Hm", "", [])),
    ("<|channel|>commentary to=python code<|message|>1 + 1", Said("", "1 + 1", [])),
    # Answers without all the marks that a message should have.
    ("4. The final answer.", Said("", "4. The final answer.", [])),
    ("<|channel|>final 4. Yes", Said("", " 4. Yes", [])),
    ("<|channel|>final Yes<|end|>", Said("", " Yes", [])),
    ("<|channel|>final json<|message|>{}", Said("", "{}", [])),
    ("<|channel|>commentary <|constrain|>json<|message|>{}", Said("", "{}", [])),
    ("<|channel|>analysis I think.<|end|>", Said("I think.", "", [])),
    ("<|channel|>analysis<|message|>Hm<|channel|>final<|message|>Hi", Said("Hm", "Hi", [])),
    (
        "<|channel|>analysis<|message|>Hm<|channel|>commentary to=functions.now<|message|>{}",
        Said("Hm", "", [("now", "{}")]),
    ),
    ("<|start|>user says hi there", Said("", "user says hi there", [])),
    (
        "<|channel|>commentary to=functions.now <|constrain|>json",
        Said("", "to=functions.now <|constrain|>json", []),
    ),
    ("<|channel|>other<|message|>Hi<|end|>and more", Said("", "Hiand more", [])),
]


@pytest.mark.parametrize(("text", "said"), HARMONY)
def test_harmony_is_a_row_of_messages(text: str, said: Said) -> None:
    assert whole(make("harmony"), text) == said
    for place in range(len(text)):
        assert cut(make("harmony"), text, [place]) == said
    assert cut(make("harmony"), text, list(range(len(text)))) == said

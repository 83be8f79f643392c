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
]


@pytest.mark.parametrize(("text", "said"), HARMONY)
def test_harmony_is_a_row_of_messages(text: str, said: Said) -> None:
    assert whole(make("harmony"), text) == said
    for place in range(len(text)):
        assert cut(make("harmony"), text, [place]) == said
    assert cut(make("harmony"), text, list(range(len(text)))) == said

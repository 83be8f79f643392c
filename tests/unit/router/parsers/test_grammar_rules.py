"""An answer with a form has it after what the model thinks, whatever the form's kind."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from llguidance import LLMatcher

from tandem.common.config.answers import AnswerConfig
from tandem.models.grammars.text import StructuredOutput, grammar_text
from tandem.router.parsers.model_format import ModelFormat
from tandem.router.request.text import TextStream
from tests.unit.router.parsers.conftest import drawn, vocabulary

SEEDS = 4
OPENED, CLOSED = "user<think>\n", "user<think>\n\n</think>\n\n"
FORMS = {
    "json_object": ("", r'\{"a": 1\}'),  # the test writes it: a drawn one hardly ends
    "json_schema": ('{"type": "integer", "maximum": 99, "minimum": 0}', r"\d\d?"),
    "regex": ("a+/<b>", r"a+/<b>"),
    "choice": (json.dumps(["left", "</right>"]), "left|</right>"),
    "grammar": ('start: "x" ("y" | z)\nz: "z"+', "x(y|z+)"),
}


class Setup:
    """A model that thinks, and a form compiled as an engine compiles it."""

    def __init__(self, folder: Path, reasoning: str = "think", tools: str = "json") -> None:
        self.tokenizer, self.compiler = vocabulary(folder)
        config = AnswerConfig(tool_parser=tools, reasoning_parser=reasoning)  # type: ignore[arg-type]
        self.answers = ModelFormat(self.tokenizer, config)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer._tokenizer.encode(text).ids

    def matcher(self, kind: str, prompt: str) -> LLMatcher:
        wanted = StructuredOutput("response_format", kind, FORMS[kind][0])  # type: ignore[arg-type]
        text = grammar_text(self.answers.after_reasoning(wanted, self.ids(prompt)))
        assert self.compiler.check(text) == ""
        return self.compiler.compile(text)

    def answer(self, kind: str, prompt: str, thought: str) -> tuple[str, str]:
        """Returns the reasoning and the content of an answer whose thought is given."""
        begun = self.ids(thought) + (self.ids('{"a": 1}') if kind == "json_object" else [])
        found = [
            drawn(self.tokenizer, self.matcher(kind, prompt), seed, begun) for seed in range(SEEDS)
        ]
        ids = next(filter(None, found))
        parser = self.answers.answer_parser((), self.ids(prompt), one_call_only=False)
        read = TextStream(self.tokenizer, (), parser).push(ids, "stop")
        return read.reasoning, read.text


@pytest.mark.parametrize("kind", FORMS)
def test_the_form_begins_after_a_thought_that_the_prompt_opens(kind: str, folder: Path) -> None:
    """Braces and quotes in the thought are none of the form."""
    setup = Setup(folder)
    reasoning, content = setup.answer(kind, OPENED, '{"hm": 7}, or?\n</think>\n\n')
    assert reasoning == '{"hm": 7}, or?'
    assert re.fullmatch(FORMS[kind][1], content, re.DOTALL), content


@pytest.mark.parametrize("kind", FORMS)
def test_a_model_may_open_a_thought_or_leave_it_out(kind: str, folder: Path) -> None:
    setup = Setup(folder)
    for thought, told in (("<think>So so.</think>", "So so."), ("", "")):
        reasoning, content = setup.answer(kind, "user", thought)
        assert reasoning == told
        assert re.fullmatch(FORMS[kind][1], content, re.DOTALL), content


def test_a_template_that_ends_the_thought_leaves_none(folder: Path) -> None:
    setup = Setup(folder)
    matcher = setup.matcher("json_schema", CLOSED)
    matcher.consume_tokens(setup.ids("<think>"))
    assert matcher.is_error()
    assert re.fullmatch(r"\d\d?", setup.answer("json_schema", CLOSED, "")[1])


def test_the_form_stands_in_the_final_channel_of_harmony(folder: Path) -> None:
    setup = Setup(folder, tools="harmony")
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    reasoning, content = setup.answer("choice", "user", thought)
    assert reasoning == "Hm."
    assert content in ("left", "</right>")
    assert setup.answer("choice", "user", "")[1] in ("left", "</right>")


def test_a_model_without_reasoning_begins_with_the_form(folder: Path) -> None:
    setup = Setup(folder, reasoning="none")
    wanted = StructuredOutput("response_format", "json_object")
    assert setup.answers.after_reasoning(wanted, [1]) == wanted


@pytest.mark.parametrize("begun", ["<|START_RESPONSE|>", "<|START_TEXT|>", ""])
def test_the_form_stands_within_the_tags_around_content(begun: str, folder: Path) -> None:
    setup = Setup(folder, reasoning="cohere")
    thought = f"<|START_THINKING|>Hm.<|END_THINKING|>{begun}"
    reasoning, content = setup.answer("choice", "user", thought)
    assert reasoning == "Hm."
    assert content in ("left", "</right>")
    closed = "<|START_THINKING|><|END_THINKING|>"
    assert setup.answer("choice", closed, begun)[1] in ("left", "</right>")

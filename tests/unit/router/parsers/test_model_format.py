"""The model's own files choose the parsers, and special tokens that a parser needs reach it."""

# DeepSeek's tokens have full-width bars.
# ruff: noqa: RUF001

from __future__ import annotations

from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import get_args

import pytest

from tandem.common.config.answers import AnswerConfig, ReasoningParser, ToolParser
from tandem.models.chat_template import ChatTemplate
from tandem.models.source import resolve
from tandem.models.tokenizer.tokenizer import Tokenizer
from tandem.router.parsers.formats import REASONING_TAGS, TOOL_FORMATS
from tandem.router.parsers.model_format import ModelFormat, make_answer_parser
from tandem.router.request.conversation import Conversation, Message, ToolCall
from tandem.router.request.prompt.formats import with_template_options
from tandem.router.request.request import ClientRequest
from tandem.router.request.text import TextStream
from tests.unit.router.parsers.test_machine import NOW, WRITERS, Said, bare_list, cut, whole

TEMPLATES = {
    "hermes": '{{ tools }}<tool_call>\n{"name": ',
    "qwen3_coder": "{{ tools }}<tool_call>\n<function=x>\n<parameter=y>",
    "glm45": "{{ tools }}<tool_call>x\n<arg_key>",
    "seed_oss": "{{ tools }}<seed:tool_call>\n<function=x>\n<parameter=y>",
    "minimax_m2": '{{ tools }}<minimax:tool_call><invoke name="x">',
    "minimax_m3": "{{ tools }}{% set ns = ']<]minimax[>[' %}{{ ns }}<tool_call>",
    "hunyuan": "{{ tools }}<tool_calls>",
    "nemotron": "{{ tools }}<TOOLCALL>[",
    "kimi_k2": "{{ tools }}<|tool_call_begin|>x<|tool_call_argument_begin|>",
    "deepseek_v3": "{{ tools }}<｜tool▁sep｜>x\n```json",
    "deepseek_v31": "{{ tools }}<｜tool▁sep｜>x",
    "deepseek_v32": "{{ tools }}<{{ '｜DSML｜' }}function_calls>",
    "deepseek_v4": "{{ tools }}<｜DSML｜tool_calls>",
    "mistral": "{{ tools }}[TOOL_CALLS]",
    "granite": "{{ tools }}<|start_of_role|>",
    "phi4_mini": "{{ tools }}<|tool|>",
    "llama3": "{{ tools }}<|start_header_id|>",
    "llama4": "{{ tools }}<|header_start|>",
    "lfm2": "{{ tools }}<|tool_list_start|>",
    "olmo3": "{{ tools }}<function_calls>",
    "gemma4": "{{ tools }}<|tool_call>call:x{}<tool_call|>",
    "cohere": "{{ tools }}[{}]<|START_ACTION|>",
    "harmony": "{{ tools }}<|start|>assistant<|channel|>x<|message|>",
    "json": "{{ tools }}",
}


@lru_cache(maxsize=1)
def builtin_tokenizer() -> Tokenizer:
    return Tokenizer(resolve("smollm2").path)


def load(tmp_path: Path, template: str) -> Tokenizer:
    """Writes a folder with the built-in model's tokenizer and another template."""
    for file in resolve("smollm2").path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = copy(builtin_tokenizer())
    tokenizer.chat_template = ChatTemplate.from_folder(tmp_path, {})
    return tokenizer


def test_options_name_every_format() -> None:
    assert set(get_args(ToolParser)) == {"auto", *TOOL_FORMATS}
    assert set(get_args(ReasoningParser)) == {"auto", *REASONING_TAGS}
    assert set(TEMPLATES) == set(TOOL_FORMATS)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_chooses_and_an_option_overrides(name: str, tmp_path: Path) -> None:
    tokenizer = load(tmp_path, TEMPLATES[name])
    chosen = ModelFormat(tokenizer, AnswerConfig())
    assert (chosen.tool_parser, chosen.reasoning_parser) == (name, "none")
    config = AnswerConfig(tool_parser="llama3", reasoning_parser="think")
    named = ModelFormat(tokenizer, config)
    assert (named.tool_parser, named.reasoning_parser) == ("llama3", "think")


def test_the_template_tells_whether_it_takes_tools(tmp_path: Path) -> None:
    assert ModelFormat(load(tmp_path, "{{ tools }}"), AnswerConfig()).takes_tools
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert not ModelFormat(Tokenizer(tmp_path), AnswerConfig()).takes_tools


@pytest.mark.parametrize("name", TEMPLATES)
def test_json_that_the_words_ask_for_is_read(name: str, tmp_path: Path) -> None:
    """The template has the marks of a format and takes no tools: the prompt asks for JSON."""
    tokenizer = load(tmp_path, TEMPLATES[name].replace("{{ tools }}", ""))
    answers = ModelFormat(tokenizer, AnswerConfig())
    tools = [{"type": "function", "function": {"name": "now"}}]
    head = "<|channel|>final<|message|>" if name == "harmony" else ""
    writers = [w for w, (parser, _) in WRITERS.items() if parser == answers.tool_parser]
    for text in (bare_list(NOW), bare_list(NOW, NOW), '{"name": "now", "arguments": {}}'):
        machine = answers.answer_parser(tools, [1], one_call_only=False)
        assert machine is not None
        said = cut(machine, head + text, list(range(len(head + text))))
        assert said == Said("", "", [("now", "{}")] * text.count("now"))
    for text in (*(writer(NOW) for writer in writers), "Hi", '{"a": [1]}', "[1, 2]", "[TOOL"):
        machine = answers.answer_parser(tools, [1], one_call_only=False)
        assert machine is not None
        said = whole(machine, text)
        assert said.calls == [("now", "{}")] or said.content == text


@pytest.mark.parametrize(
    ("template", "continued", "said"),
    [
        (TEMPLATES["harmony"], "It is", Said("", " 4.", [])),
        (TEMPLATES["json"], '{"name":', Said("", " 4.", [])),
        ("{{ tools }}<think></think>", "It is", Said("", " 4.", [])),
        ("{{ tools }}<think></think>", "<think>It is", Said("4.", "", [])),
        ("{{ tools }}<think></think>", "<think>a</think>It is", Said("", " 4.", [])),
    ],
)
def test_the_answer_goes_on_where_the_prompt_ends(
    template: str, continued: str, said: Said, tmp_path: Path
) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    answers = ModelFormat(load(tmp_path, template), AnswerConfig())
    machine = answers.answer_parser(tools, [1], one_call_only=False, continued=continued)
    assert machine is not None
    assert whole(machine, " 4.") == said


def test_calls_that_the_template_does_not_show_are_written(tmp_path: Path) -> None:
    shows = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    shows += "{{ c.function.arguments }}{% endfor %}{% endfor %}{{ tools }}"
    calls = [("f", {"a": 1, "b": "c"}), ("g", {})]
    assert ModelFormat(load(tmp_path, shows), AnswerConfig()).written_calls(calls, tools=True) == ""
    (tmp_path / "chat_template.jinja").write_text("{{ tools }}{{ messages[0].content }}")
    tokenizer = Tokenizer(tmp_path)
    schemas = {"f": {"properties": {"b": {"type": "string"}}}, "g": {}}
    for parser in get_args(ToolParser):
        answers = ModelFormat(tokenizer, AnswerConfig(tool_parser=parser))
        text = answers.written_calls(calls, tools=True)
        tool_format = TOOL_FORMATS["json" if parser == "auto" else parser]
        said = whole(make_answer_parser(tool_format, None, schemas=schemas), text)
        assert said.calls[0] == ("f", '{"a": 1, "b": "c"}'), text
        assert parser == "harmony" or [name for name, _ in said.calls] == ["f", "g"]


def test_results_that_the_template_does_not_show_are_told(tmp_path: Path) -> None:
    shows = "{{ tools }}{% for m in messages %}{% if m.role in roles %}{{ m.content }}"
    shows += "{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}"
    shows += "{% endif %}{% endfor %}"
    call = ToolCall("id", "f", {"a": 1})
    chat = Conversation(
        (Message("user", "?"), Message("assistant", None, (call,)), Message("tool", "21")),
        tools=({"type": "function", "function": {"name": "f"}},),
    )
    for roles, last in (("'user', 'assistant'", "user"), ("'user', 'assistant', 'tool'", "tool")):
        folder = tmp_path / last
        folder.mkdir()
        template = f"{{% set roles = [{roles}] %}}{shows}"
        answers = ModelFormat(load(folder, template), AnswerConfig())
        filled = with_template_options(answers, ClientRequest(prompt=chat)).prompt
        assert isinstance(filled, Conversation)
        assert filled.messages[-1].role == last
        assert "21" in (filled.messages[-1].content or "")


def test_a_model_that_does_not_think_ignores_the_wish(tmp_path: Path) -> None:
    plain = ModelFormat(load(tmp_path, "{{ messages }}"), AnswerConfig())
    assert [plain.template_options({}, None, wish) for wish in (True, False)] == [{}, {}]
    assert plain.template_options({"a": 1, "tools": [], "messages": []}, "low") == {}
    assert plain.without_effect({}, None, False) == []
    assert plain.without_effect({}, "none") == []
    names = ["chat_template_kwargs.messages", "reasoning_effort", "thinking"]
    assert plain.without_effect({"messages": []}, "low", True) == names


@pytest.mark.parametrize(
    ("template", "on", "off"),
    [
        ("{{ enable_thinking }}", {"enable_thinking": True}, {"enable_thinking": False}),
        ("{{ thinking_mode }}", {"thinking_mode": "enabled"}, {"thinking_mode": "disabled"}),
        ("{{ thinking_budget }}", {"thinking_budget": -1}, {"thinking_budget": 0}),
        ("{{ reasoning }}", {"reasoning": True}, {"reasoning": False}),
        (
            "{{ reasoning_effort or 'no_think' }}",
            {"reasoning_effort": "high"},
            {"reasoning_effort": "no_think"},
        ),
    ],
)
def test_each_family_turns_its_reasoning_off(
    template: str, on: dict[str, object], off: dict[str, object], tmp_path: Path
) -> None:
    answers = ModelFormat(load(tmp_path, f"<think></think>{template}"), AnswerConfig())
    assert answers.template_options({}, None, True) == on
    assert answers.template_options({}, None, False) == off
    assert answers.template_options({}, "none") == off
    assert answers.without_effect({}, "none", True) == []


def test_harmony_is_read_without_tools_too(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, TEMPLATES["harmony"])
    machine = ModelFormat(tokenizer, AnswerConfig()).answer_parser((), [1], one_call_only=False)
    assert machine is not None
    said = machine.finish(
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Hi"
    )
    assert (said.reasoning, said.content) == ("Hm", "Hi")


def test_the_prompt_may_open_the_reasoning(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, "<think></think>")
    answers = ModelFormat(tokenizer, AnswerConfig())
    for prompt, reasoning in (("Hi <think>\n", "a"), ("<think>\n\n</think>\n", ""), ("Hi", "")):
        machine = answers.answer_parser((), tokenizer.encode(prompt), one_call_only=False)
        assert machine is not None
        assert machine.finish("a</think>b").reasoning == reasoning
    seed = ModelFormat(tokenizer, AnswerConfig(reasoning_parser="seed_oss"))
    for prompt in ("<seed:think>", "<seed:think><seed:cot_budget_reflect>"):
        machine = seed.answer_parser((), tokenizer.encode(prompt), one_call_only=False)
        assert machine is not None
        assert machine.finish("a</seed:think>b").reasoning == "a"
    plain = ModelFormat(tokenizer, AnswerConfig(reasoning_parser="none"))
    assert plain.answer_parser((), [1], one_call_only=False) is None


def test_special_tokens_reach_the_parser_that_needs_them(tmp_path: Path) -> None:
    load(tmp_path, "{{ tools }}")
    backend = Tokenizer(tmp_path)._tokenizer
    backend.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "[OTHER]"])
    backend.save(str(tmp_path / "own.json"))
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "own.json").rename(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer(tmp_path)
    answers = ModelFormat(tokenizer, AnswerConfig(tool_parser="mistral"))
    tools = [{"type": "function", "function": {"name": "now"}}]
    ids = tokenizer.encode("[OTHER]Hi[TOOL_CALLS]now[ARGS]{}", add_special_tokens=False)
    text = TextStream(tokenizer, (), answers.answer_parser(tools, ids[:1], one_call_only=False))
    pieces = [text.push([i], "") for i in ids] + [text.push([2], "stop")]
    calls = [call for piece in pieces for call in piece.tool_calls]
    assert "".join(p.text for p in pieces) == "Hi"
    assert [c.name for c in calls if c.name] == ["now"]
    assert "".join(c.arguments for c in calls) == "{}"
    assert pieces[-1].finish_reason == "tool_calls"
    without = TextStream(tokenizer, ())
    assert without.push(ids, "length").text == "Hinow{}"

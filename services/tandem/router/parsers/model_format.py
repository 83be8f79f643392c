"""Describes how one model writes tool calls and reasoning, and what its chat template supports.

The formats are chosen by the chat template, or by options if they are set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tandem.common.config.answers import AnswerConfig
from tandem.errors import BadRequest
from tandem.models.chat_template import ChatTemplate
from tandem.models.grammars.text import StructuredOutput
from tandem.models.tokenizer.tokenizer import Tokenizer
from tandem.router.parsers.forced_calls import without_limits, write_grammar
from tandem.router.parsers.formats import (
    REASONING_TAGS,
    TOOL_FORMATS,
    CallFrame,
    ReasoningTags,
    ToolFormat,
    choose_reasoning,
    choose_tool_format,
    read_json_too,
)
from tandem.router.parsers.grammar_rules import write_head
from tandem.router.parsers.machine import AnswerParser, Rules, State, Text

_PLAIN = ToolFormat(states={"content": State(Text.CONTENT)})
# The tag that opens reasoning, such as <think>, is looked for in this many last tokens of a prompt.
_TAIL_TOKENS = 16
# Chat template variable -> its values that turn reasoning on and off.
_SWITCHES: Mapping[str, tuple[Any, Any]] = {
    "enable_thinking": (True, False),
    "thinking": (True, False),
    "thinking_mode": ("enabled", "disabled"),  # MiniMax M3
    "thinking_budget": (-1, 0),  # Seed-OSS
    "reasoning": (True, False),  # Command A
}
_OWN_VARIABLES = frozenset(("tools", "add_generation_prompt"))


class ModelFormat:
    """Checks the options of chats with one model, and creates the parsers of the model's answers.

    Thread-safe.
    """

    def __init__(self, tokenizer: Tokenizer, config: AnswerConfig) -> None:
        template = tokenizer.chat_template
        sources = [one.source for one in (template, template and template.tool_use) if one]
        tools = config.tool_parser
        reasoning = config.reasoning_parser
        source = "\n".join(sources)
        tokens = tokenizer.added_tokens
        auto = choose_tool_format(sources[-1] if sources else "", tokens)
        self.tool_parser = auto if tools == "auto" else tools
        auto = choose_reasoning(source, tokens)
        self.reasoning_parser = auto if reasoning == "auto" else reasoning
        self._template = template
        self._source = source
        self._tokenizer = tokenizer
        self._format = TOOL_FORMATS[self.tool_parser]
        self._reads_all = self._format.thought is not None
        self._reasoning = None if self._reads_all else REASONING_TAGS[self.reasoning_parser]
        self._variables = frozenset() if template is None else template.variables
        # The format of answers to chats with tools. If the template does not support tools, the
        # router writes the tools into the prompt and requests calls in the format `json`
        # (told_tools.py), so answers in that format must be parsed, too.
        self._calls = self._format if self.takes_tools else read_json_too(self._format)
        if tools == "auto" and not (self.takes_tools or self._reads_all):
            self._calls = replace(self._calls, frames=TOOL_FORMATS["json"].frames)

    @property
    def takes_tools(self) -> bool:
        """True if the chat template writes tools into the prompt."""
        return "tools" in self._variables

    @property
    def takes_system(self) -> bool:
        """True if the chat template writes a system message into the prompt."""
        return self._template is None or self._template.takes_system

    def written_calls(self, calls: Sequence[tuple[str, Mapping[str, Any]]], *, tools: bool) -> str:
        """Returns the tool calls of an earlier answer as text in the model's own format.

        Returns "" if the chat template writes calls into the prompt itself. `tools` is True if the
        chat has tools.
        """
        template = self._template_of(tools=tools)
        if template is None or template.shows_calls:
            return ""
        return self._frame.write(calls)

    def shows_results(self, *, tools: bool) -> bool:
        """Returns whether the chat template writes the results of tool calls into the prompt.

        `tools` is True if the chat has tools.
        """
        template = self._template_of(tools=tools)
        return template is None or template.shows_results

    def _template_of(self, *, tools: bool) -> ChatTemplate | None:
        template = self._template
        return (template and template.tool_use if tools else None) or template

    @property
    def _frame(self) -> CallFrame:
        return next(f for f in self._calls.frames if not f.sign or self._knows(f.sign))

    def _knows(self, sign: str) -> bool:
        return sign in self._source or sign in self._tokenizer.added_tokens

    @property
    def reasons(self) -> bool:
        """True if answers may have reasoning."""
        return self._reasoning is not None or self._reads_all

    @property
    def takes_effort(self) -> bool:
        """True if the chat template writes the reasoning effort into the prompt."""
        return "reasoning_effort" in self._variables

    def template_options(
        self, requested: Mapping[str, Any], effort: str | None, thinking: bool | None = None
    ) -> dict[str, Any]:
        """Returns the values of the chat template's variables for a request.

        `requested` are the `chat_template_kwargs`. What the template does not read has no effect;
        `without_effect` has its names.
        """
        taken = self._variables - _OWN_VARIABLES
        own = {name: value for name, value in requested.items() if name in taken}
        switched = {} if thinking is None else self._switched(is_on=thinking)
        return {**switched, **self._effort(effort), **own}

    def without_effect(
        self, requested: Mapping[str, Any], effort: str | None, thinking: bool | None = None
    ) -> list[str]:
        """Returns the names of the options that change nothing for this model. The arguments are
        those of `template_options`."""
        taken = self._variables - _OWN_VARIABLES
        names = [f"chat_template_kwargs.{name}" for name in requested if name not in taken]
        # A model that never reasons needs no switch that turns reasoning off.
        reasons = self.reasons
        if effort is not None and not self._effort(effort) and (effort != "none" or reasons):
            names.append("reasoning_effort")
        if thinking is not None and not self._switched(is_on=thinking) and thinking != reasons:
            names.append("thinking")
        return names

    def _effort(self, effort: str | None) -> dict[str, Any]:
        if effort == "none" and (off := self._switched(is_on=False)):
            return off
        return {"reasoning_effort": effort} if effort is not None and self.takes_effort else {}

    def _switched(self, *, is_on: bool) -> dict[str, Any]:
        """Returns the variable that turns reasoning on or off; {} if the template has none."""
        for name, (on, off) in _SWITCHES.items():
            if name in self._variables:
                return {name: on if is_on else off}
        if self.takes_effort and "no_think" in self._source:  # Hy3
            return {"reasoning_effort": "high" if is_on else "no_think"}
        return {}

    def answer_parser(
        self,
        tools: Sequence[Mapping[str, Any]],
        prompt_token_ids: Sequence[int],
        *,
        one_call_only: bool,
        finish_reason: str = "tool_calls",
        continued: str | None = None,
        known_names_only: bool = False,
    ) -> AnswerParser | None:
        """Returns the parser of an answer to a chat; None if all text of the answer is content.

        `finish_reason` is the finish reason of an answer with calls. If the answer continues the
        chat's last message, `continued` is the content of that message; otherwise None. If
        `known_names_only` is true, a call of a function that is not in `tools` is content.
        """
        if not (tools or self._reads_all or self._reasoning):
            return None
        functions = [tool["function"] for tool in tools]
        return make_answer_parser(
            self._calls if tools else self._format if self._reads_all else None,
            self._reasoning,
            schemas={f["name"]: f.get("parameters") for f in functions},
            one_call_only=one_call_only,
            finish_reason=finish_reason,
            begins_in_reasoning=self._begins_in_reasoning(prompt_token_ids, continued or ""),
            begins_in_content=continued is not None,
            known_names_only=known_names_only,
        )

    def forced_calls(
        self,
        tools: Sequence[Mapping[str, Any]],
        prompt_token_ids: Sequence[int],
        *,
        one_call_only: bool,
    ) -> StructuredOutput:
        """Returns the constraint for an answer that must call tools. Raises BadRequest."""
        write = self._grammar_of(tools, prompt_token_ids, one_call_only=one_call_only)
        return StructuredOutput("tools", "lark", write())

    def calls_or(
        self,
        wanted: StructuredOutput,
        tools: Sequence[Mapping[str, Any]],
        prompt_token_ids: Sequence[int],
        *,
        one_call_only: bool,
    ) -> StructuredOutput:
        """Returns a constraint that allows reasoning, followed by calls of tools or by what
        `wanted` allows. There are no calls if they begin as an object does, as those of Llama 3, or
        cannot be written as a grammar."""
        if f"{self._frame.opens}{self._frame.before}".startswith("{"):
            return self.after_reasoning(wanted, prompt_token_ids)
        loose = [without_limits(tool, self._frame) for tool in tools]
        write = self._grammar_of(loose, prompt_token_ids, one_call_only=one_call_only)
        around_content = self._reasoning.around_content if self._reasoning else ()
        try:
            head = StructuredOutput("tools", "lark", write(around_content=around_content))
        except BadRequest:
            return self.after_reasoning(wanted, prompt_token_ids)
        return replace(wanted, head=head.source)

    def _grammar_of(
        self,
        tools: Sequence[Mapping[str, Any]],
        prompt_token_ids: Sequence[int],
        *,
        one_call_only: bool,
    ) -> Callable[..., str]:
        return partial(
            write_grammar,
            tools,
            self._calls,
            self._thought(prompt_token_ids),
            frame=self._frame,
            split_at_added=self._tokenizer.split_at_added,
            begins_in_reasoning=self._begins_in_reasoning(prompt_token_ids),
            one_call_only=one_call_only,
        )

    def after_reasoning(
        self, wanted: StructuredOutput, prompt_token_ids: Sequence[int]
    ) -> StructuredOutput:
        """Returns a constraint that allows reasoning, followed by what `wanted` allows."""
        head = write_head(
            self._format if self._reads_all else _PLAIN,
            self._thought(prompt_token_ids),
            around_content=self._reasoning.around_content if self._reasoning else (),
            split_at_added=self._tokenizer.split_at_added,
            begins_in_reasoning=self._begins_in_reasoning(prompt_token_ids),
        )
        return replace(wanted, head=head)

    def _thought(self, prompt_token_ids: Sequence[int]) -> ReasoningTags | None:
        """Returns the tags of an answer's reasoning; None if the answer can have no reasoning."""
        reasoning = self._reasoning
        if reasoning is not None and self._ends_with(prompt_token_ids, reasoning.closes):
            return None  # the prompt already ends the reasoning, so the answer has none
        return self._format.thought or reasoning

    def _begins_in_reasoning(self, prompt_token_ids: Sequence[int], continued: str = "") -> bool:
        if self._reasoning is None:
            return False
        tags = self._reasoning
        if continued.rfind(tags.opens) > continued.rfind(tags.closes):
            return True
        ends = {tags.opens, tags.opens + tags.prompt_adds}
        return any(self._ends_with(prompt_token_ids, end) for end in ends)

    def _ends_with(self, prompt_token_ids: Sequence[int], tag: str) -> bool:
        tail = prompt_token_ids[-_TAIL_TOKENS:]
        return (
            self._tokenizer.decode(tail, skip_special_tokens=False).rstrip().endswith(tag.rstrip())
        )


def make_answer_parser(
    tools: ToolFormat | None,
    reasoning: ReasoningTags | None,
    *,
    schemas: Mapping[str, Any],
    one_call_only: bool = False,
    finish_reason: str = "tool_calls",
    begins_in_reasoning: bool = False,
    begins_in_content: bool = False,
    known_names_only: bool = False,
) -> AnswerParser:
    """Returns the parser of one answer. `schemas` maps a function's name to its parameters' schema.

    `begins_in_content` is True if the answer continues the content of the prompt's last message.
    `begins_in_reasoning` is True if the prompt ends within reasoning, such as after "<think>".
    """
    tool_format = tools or _PLAIN
    states = dict(tool_format.states)
    start = tool_format.start
    marks: Mapping[str, str] = {}
    content_marks: Mapping[str, str] = {}
    if reasoning is not None:
        marks = states[start].terminals
        heads = dict.fromkeys((opens for opens, _ in reasoning.around_content), start)
        tails = dict.fromkeys((closes for _, closes in reasoning.around_content), "begin")
        content_marks = heads | tails
        answer = "begin" if heads else start
        begin = {reasoning.opens: "reasoning", **heads, **(marks if heads else {})}
        for name, state in tool_format.states.items():
            # A model may make a call within reasoning. Then the tag that closes reasoning, such as
            # </think>, follows the call.
            if state.text is Text.BETWEEN:
                terminals = {**state.terminals, **heads, reasoning.closes: "content"}
                states[name] = replace(state, terminals=terminals)
        content = states["content"]
        states |= {
            "content": replace(content, terminals={**content.terminals, **tails}),
            "reasoning": State(Text.REASONING, {**marks, reasoning.closes: answer}),
            "begin": State(Text.BETWEEN, begin, otherwise=start),
        }
        start = "begin"
    if begins_in_content:
        start = "content"
    if begins_in_reasoning:
        start = "reasoning"
    rules = Rules(
        make_id=tool_format.make_id,
        name_of=tool_format.name_of,
        schemas=schemas,
        known_names_only=known_names_only or tool_format.known_names_only,
        one_call_only=one_call_only,
        finish_reason=finish_reason,
        trims_lines=tool_format.trims_lines,
        call_marks=frozenset(marks),
        content_marks=frozenset(content_marks),
    )
    return AnswerParser(states, start, rules)

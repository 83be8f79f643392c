"""Splits a model's text into content, reasoning and tool calls while it is generated.

A format is a state machine, given as data. In each state, the text has one meaning, such as content
or a function's name. A terminal is a string that ends a state and leads to the next state. The
format of the Hermes models, for example:
    State      Meaning of the text        What ends the state        Next state
    content    content                    terminal <tool_call>       call
    call       a call, as JSON            terminal </tool_call>      between
    between    white space, is dropped    terminal <tool_call>       call
                                          text, not white space      content
Four rules apply to every format:
- All text except markup, such as <tool_call>, is returned as content, as reasoning or in a call.
- Text that may be the start of a terminal is held back until more text comes. So the result does
  not depend on how the text is cut into pieces.
- Text that may be a call is held back until the function's name is known and the arguments begin.
  If the text turns out not to be a call, all of it is content. Once the arguments have begun, they
  are returned as the model writes them, even if they are invalid.
- White space between content, reasoning and calls is dropped.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tandem.router.parsers.json_text import SPACE, CallText, JsonText, in_json
from tandem.router.parsers.literal_text import LiteralCall, Notation
from tandem.router.parsers.pair_arguments import PairArguments

_WORD = re.compile(r"\s*[^\s<>{}\[\]\"]{0,256}\s*")


class Text(Enum):
    """The meaning of the text in a state."""

    CONTENT = "what the client reads"
    REASONING = "what the model thinks"
    BETWEEN = "space outside calls"
    INSIDE = "space inside a call"
    NAME = "a function's name"
    SKIPPED = "a word of a call that tells nothing"
    ARGUMENTS = "a JSON object"
    CALLS = "calls as JSON objects or in the state's notation, or a list of them"
    HEAD = "space before a message's head"
    LABEL = "a word in a message's head"
    KEY = "a parameter's name"
    VALUE = "a parameter's value, whose type the schema tells"
    TEXT_VALUE = "a parameter's value that is a string"
    VALUE_END = "the name in a tag that ends a value; `otherwise` follows a parameter's value"


_HEADS = (Text.HEAD, Text.LABEL)
_VALUES = (Text.VALUE, Text.TEXT_VALUE)
_OUTSIDE = (Text.CONTENT, Text.REASONING, Text.BETWEEN, *_HEADS)


@dataclass(frozen=True, slots=True)
class State:
    """A state of a format's state machine. `terminals` maps a terminal to the next state's name."""

    text: Text
    terminals: Mapping[str, str] = field(default_factory=dict)
    # Name of the next state if text follows that this state cannot contain: for example, text that
    # is not white space in a state of the kind BETWEEN.
    otherwise: str = "content"
    # How calls are written in a state of the kind CALLS, besides JSON. None: only as JSON.
    notation: Notation | None = None

    @property
    def marks(self) -> Sequence[str]:
        """The strings in the state's text that have a meaning of their own."""
        return (*self.terminals, *(self.notation.quotes if self.notation else ()))


@dataclass(slots=True)
class CallDelta:
    """New text of one tool call. Only the first delta of a call has the id and the name."""

    index: int
    arguments: str
    id: str = ""
    name: str = ""


@dataclass(slots=True)
class Parts:
    """The parts of one piece of text. Their order is reasoning, content, calls."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Rules:
    """Settings of the parser for one format and one request, besides the states."""

    make_id: Callable[[str], str]  # name as the model wrote it -> id of the call
    name_of: Callable[[str], str]  # name as the model wrote it -> name of the function
    schemas: Mapping[str, Any]  # function name -> schema of the parameters
    # True: a call of a function that is not in `schemas` is content. This is for formats without
    # markup around calls, in which a call cannot be distinguished from other JSON.
    known_names_only: bool = False
    one_call_only: bool = False  # True: the answer ends after the first call
    # Finish reason of a complete answer that contains a call.
    finish_reason: str = "tool_calls"
    # True: the model writes each parameter's value on lines of its own, so the line breaks before
    # and after the value are removed.
    trims_lines: bool = False
    # Terminals, such as <tool_call>, that may begin a call even within reasoning. If no call of a
    # known function follows, the terminal is part of the reasoning.
    call_marks: frozenset[str] = frozenset()
    # Terminals around content, such as <response>. They are dropped.
    content_marks: frozenset[str] = frozenset()


class AnswerParser:
    """Parses one answer. The caller passes each piece of text to `push`, and ends with `finish`."""

    def __init__(self, states: Mapping[str, State], start: str, rules: Rules) -> None:
        self._states = states
        self._rules = rules
        self._state = states[start]
        self._strips_start = self._state.text is Text.REASONING
        self._parts = Parts()
        self._pending = ""
        # White space at the end of content or reasoning. It is returned if more text follows.
        self._space = ""
        # Text that looks like the start of a call. If no call follows, this text becomes content or
        # reasoning.
        self._raw = ""
        # True: one of `Rules.call_marks` has occurred within reasoning, but it is not yet known
        # whether a call follows.
        self._has_mark_in_reasoning = False
        self._word = ""  # text so far of a function's name, a parameter's name or another word
        self._name = ""
        self._is_open = False  # True: the last call was returned, but its arguments have not ended
        self._after_call = False
        self._in_list = False
        self._arguments: JsonText | None = None
        self._call: CallText | LiteralCall | None = None
        # True: the arguments are invalid JSON. They are returned unchanged up to the next terminal.
        self._is_raw = False
        self._pairs: PairArguments | None = None
        self.num_calls = 0
        self.is_done = False  # True: the answer is complete, and further text is ignored

    @property
    def finish_reason(self) -> str:
        """The finish reason if the answer ends here without reaching a limit such as max_tokens."""
        return self._rules.finish_reason if self.num_calls else "stop"

    @property
    def terminals(self) -> set[str]:
        """All strings that separate content, reasoning and calls, or the parts of a call."""
        return {mark for state in self._states.values() for mark in state.marks}

    @property
    def in_reasoning(self) -> bool:
        """True if the text so far ends within reasoning."""
        return self._state.text is Text.REASONING or self._has_mark_in_reasoning

    @property
    def may_begin_reasoning(self) -> bool:
        """True if the next text may be a tag that begins reasoning."""
        return any(self._states[n].text is Text.REASONING for n in self._state.terminals.values())

    @property
    def ends_after_call(self) -> bool:
        """True if the answer is complete after its first call, whatever the model writes then."""
        return self._rules.one_call_only

    def push(self, text: str) -> Parts:
        """Takes a piece of text. Returns all text that need not be held back any longer."""
        self._parts = Parts()
        self._pending += text
        self._run(final=False)
        return self._parts

    def finish(self, text: str = "") -> Parts:
        """Takes the last piece of text. Returns this piece and all text that was held back."""
        parts = self.push(text)
        if self._state.text in _HEADS and self._pending.startswith("<|"):
            self._pending = ""  # incomplete markup at the end of the answer
        self._run(final=True)
        if self._is_open and self._pairs is not None:
            key = self._word if self._state.text is Text.KEY else ""
            is_cut = key or self._pairs.is_in_value
            self._add_arguments(self._pairs.cut(key) if is_cut else self._pairs.end())
        elif self._is_open and self._call is not None:
            self._add_arguments(self._call.held)
        elif not self._is_open and not self.is_done:
            (self._add_reasoning if self._has_mark_in_reasoning else self._add_content)(self._raw)
        self._put(self._space)
        self._space = self._raw = ""
        return parts

    def _run(self, *, final: bool) -> None:
        while self._pending and not self.is_done and self._step(final=final):
            pass

    def _step(self, *, final: bool) -> bool:
        """Takes some of the pending text; returns False if all of it is held back."""
        if self._call is not None:
            self._read_call(self._call)
            return True
        if self._arguments is not None and not self._is_raw:
            self._read_arguments(self._arguments)
            return True
        text, terminal = split_at_terminal(self._state.terminals, self._pending, final=final)
        if not text and not terminal:
            return False
        self._pending = self._pending[len(text) + len(terminal) :]
        state = self._state
        left = self._take(text)
        if self._state is not state or left:
            self._pending = left + terminal + self._pending
        elif terminal:
            self._leave(terminal)
        return True

    def _leave(self, terminal: str) -> None:
        """Ends the current state at `terminal`, and enters the next state."""
        kind = self._state.text
        name = self._state.terminals[terminal]
        next_kind = self._states[name].text
        # One of `call_marks` occurred within reasoning, but no call followed, so the reasoning
        # continues. In reasoning, `terminal` may have another effect, so it is read again.
        if self._has_mark_in_reasoning and next_kind is Text.CONTENT:
            self._enter(name)
            self._pending = terminal + self._pending
            return
        if terminal in self._rules.content_marks:
            self._raw = self._space = ""
            self._strips_start = True
        elif kind in (Text.CONTENT, Text.REASONING):
            self._has_mark_in_reasoning = (
                kind is Text.REASONING and terminal in self._rules.call_marks
            )
            begins_call = self._has_mark_in_reasoning or (
                kind is Text.CONTENT and next_kind not in _HEADS
            )
            self._raw = self._space + terminal if begins_call else ""
            self._space = ""
            self._strips_start |= kind is Text.REASONING and not self._has_mark_in_reasoning
        elif kind in _HEADS:
            if self._states[name] is self._state:
                self._raw += terminal
            else:  # hold back a call's header, which becomes content if no arguments follow
                self._raw = terminal if next_kind is Text.NAME else ""
            self._after_call = self._after_call and next_kind is not Text.NAME
        elif not self._is_open and not (self._after_call and next_kind in (*_OUTSIDE, Text.INSIDE)):
            self._raw = terminal if self._after_call else self._raw + terminal
            self._after_call = False
        if kind is Text.CALLS and next_kind in _HEADS:
            self._add_content(self._raw.removesuffix(terminal))
            self._raw = ""
        if next_kind is Text.REASONING:
            self._raw = ""
        if kind is Text.NAME and not self._end_name(next_kind):
            name = "content"
        if kind is Text.KEY and self._pairs is not None:
            is_text = next_kind is Text.TEXT_VALUE
            self._add_arguments(self._pairs.begin_value(self._word.strip(), is_text=is_text))
        ends_value = kind in _VALUES and next_kind not in (Text.KEY, Text.VALUE_END)
        if self._pairs is not None and (ends_value or kind is Text.VALUE_END):
            self._add_arguments(self._pairs.end_value())
            name = name if ends_value or self._pairs.is_in_value else self._state.otherwise
        self._enter(name)

    def _enter(self, name: str) -> None:
        if self._has_mark_in_reasoning and self._states[name].text is Text.CONTENT:
            name = "reasoning"
        self._state = self._states[name]
        kind = self._state.text
        if kind in _OUTSIDE and self._is_open:
            self._end_call()
        if kind is Text.REASONING:
            self._strips_start |= not self._has_mark_in_reasoning
            self._add_reasoning(self._raw)
            self._raw = ""
            self._has_mark_in_reasoning = False
        if kind is Text.CONTENT:
            raw = self._raw
            self._raw = ""
            self._strips_start = self._strips_start or self._after_call
            self._after_call = self._in_list = False
            self._add_content(raw)
        self._word = ""

    def _take(self, text: str) -> str:
        """Takes the beginning of `text` that the current state may contain; returns the rest."""
        kind = self._state.text
        if kind is Text.CONTENT:
            self._add_content(text)
        elif kind is Text.REASONING:
            self._add_reasoning(text)
        elif self._is_raw:
            self._add_arguments(text)
        elif kind in (Text.KEY, Text.VALUE_END):
            self._word += text
        elif kind in _VALUES and self._pairs is not None:
            self._add_arguments(self._pairs.push(text))
        elif kind in (Text.NAME, Text.SKIPPED, Text.LABEL):
            return self._take_word(text)
        elif text:
            return self._take_space(text)
        return ""

    def _take_word(self, text: str) -> str:
        """Takes a word in the header of a call or message, and returns the text after the word.

        Further text leads to the state `otherwise`.
        """
        found = _WORD.match(self._word + text)
        assert found is not None  # the pattern also matches an empty text
        num_taken = found.end() - len(self._word)
        self._word += text[:num_taken]
        self._raw += text[:num_taken]
        if num_taken < len(text):
            self._enter(self._state.otherwise)
        return text[num_taken:]

    def _take_space(self, text: str) -> str:
        """Takes white space, and returns the text after the white space.

        The returned text begins the JSON of a call, or leads to another state.
        """
        rest = text.lstrip(SPACE)
        if not self._is_open and not self._after_call:
            self._raw += text[: len(text) - len(rest)]
        if not rest:
            return ""
        kind = self._state.text
        if kind is Text.CALLS and self._take_mark(rest[0]):
            return rest[1:]
        notation = self._state.notation
        begins_literal = notation is not None and notation.begins_with(rest[0])
        if kind is Text.CALLS and (rest[0] == "{" or begins_literal):
            self._raw = "" if self._after_call else self._raw
            self._after_call = False
            self._call = LiteralCall(notation) if notation and begins_literal else CallText()
        elif kind is Text.ARGUMENTS and rest[0] == "{" and self._open_call(self._name):
            self._arguments = JsonText()
        elif kind in (Text.BETWEEN, Text.HEAD) or (kind is Text.CALLS and not self._after_call):
            self._enter(self._state.otherwise)
        else:
            self._enter("content")
        return rest

    def _take_mark(self, char: str) -> bool:
        """Takes a bracket of a list of calls, or a separator of two calls.

        Returns False if the character is neither.
        """
        if self._after_call and (char in ",;" or (char == "]" and self._in_list)):
            self._in_list = self._in_list and char != "]"
            return True
        if char == "[" and not self._in_list and not self._after_call:
            self._raw += char
            self._in_list = True
            return True
        return False

    # The methods below read tool calls. A terminal within the JSON of a call is ordinary text.

    def _read_call(self, call: CallText | LiteralCall) -> None:
        for index, char in enumerate(self._pending):
            if not self._take_call_character(call, char):
                self._pending = self._pending[index:]
                self._call = None
                if self._is_open and call.is_streaming:
                    self._add_arguments(call.held)
                    self._is_raw = True
                else:
                    self._enter("content")
                return
            if call.has_ended:
                self._pending = self._pending[index + 1 :]
                self._end_call()
                return
        self._pending = ""

    def _take_call_character(self, call: CallText | LiteralCall, char: str) -> bool:
        """Takes a character of a JSON call. Returns False if the text cannot be a call."""
        arguments = call.push(char)
        if call.is_broken:
            return False
        if call.whole is not None:
            arguments = call.whole.arguments
        if arguments and not self._is_open:
            name = call.name if call.whole is None else call.whole.name
            if not self._open_call(name):
                return False
        if self._is_open:
            self._add_arguments(arguments)
        else:
            self._raw += char
        return True

    def _read_arguments(self, arguments: JsonText) -> None:
        taken = []
        for char in self._pending:
            in_string = arguments.in_string
            if not arguments.push(char):
                self._is_raw = True
                break
            taken.append(in_json(char, in_string=in_string))
            if arguments.expects == "end":
                break
        self._pending = self._pending[len(taken) :]
        self._add_arguments("".join(taken))
        if arguments.expects == "end":
            self._end_call()

    def _end_name(self, next_kind: Text) -> bool:
        """Ends the name of a call. Returns False if the text cannot be a call.

        A call whose arguments are written as tagged parameters is added to the result here. Other
        calls are added when the JSON of their arguments begins.
        """
        self._name = self._word.strip()
        if next_kind in (Text.ARGUMENTS, Text.SKIPPED, Text.LABEL):
            return bool(self._name)
        return self._open_call(self._name, has_pairs=True)

    def _open_call(self, written: str, *, has_pairs: bool = False) -> bool:
        """Adds a call to the result. Returns False if the text cannot be a call.

        Example: within reasoning, a call of an unknown function is ordinary text.
        """
        rules = self._rules
        name = rules.name_of(written)
        is_known = name in rules.schemas or not (
            rules.known_names_only or self._has_mark_in_reasoning
        )
        if self._after_call or not name or not is_known:
            return False
        self._has_mark_in_reasoning = False
        self._parts.calls.append(CallDelta(self.num_calls, "", rules.make_id(written), name))
        self.num_calls += 1
        self._is_open = True
        self._raw = ""
        if has_pairs:
            schema = rules.schemas.get(name)
            self._pairs = PairArguments(schema, trims_lines=rules.trims_lines)
        return True

    def _end_call(self) -> None:
        if self._pairs is not None:
            self._add_arguments(self._pairs.end())
        self._is_open = False
        self._after_call = True
        self._call = self._arguments = self._pairs = None
        self._is_raw = False
        self._raw = ""
        self.is_done = self._rules.one_call_only

    def _add_arguments(self, text: str) -> None:
        if not text:
            return
        calls = self._parts.calls
        if not calls or calls[-1].index != self.num_calls - 1:
            calls.append(CallDelta(self.num_calls - 1, ""))
        calls[-1].arguments += text

    def _add_content(self, text: str) -> None:
        self._parts.content += self._kept(text)

    def _add_reasoning(self, text: str) -> None:
        self._parts.reasoning += self._kept(text)

    def _kept(self, text: str) -> str:
        """Holds back the white space at the end of `text`, and returns the text before it.

        White space at the start of content or reasoning is dropped.
        """
        if self._strips_start:
            text = text.lstrip(SPACE)
        if not text:
            return ""
        self._strips_start = False
        text = self._space + text
        kept = text.rstrip(SPACE)
        self._space = text[len(kept) :]
        return kept

    def _put(self, space: str) -> None:
        if self.in_reasoning:
            self._parts.reasoning += space
        else:
            self._parts.content += space


def split_at_terminal(terminals: Mapping[str, str], text: str, *, final: bool) -> tuple[str, str]:
    """Returns (text before the first terminal, the terminal or ""). Of two terminals that begin at
    one place, the longer one is returned.

    If `final` is False, more text may follow. So a possible beginning of a terminal at the end of
    `text` is in neither result. Example: with the terminal "</think>", "so </thi" gives
    ("so ", "").
    """
    if not any(t[0] in text for t in terminals):  # the usual case, which must be fast
        return text, ""
    end = min((at for t in terminals if (at := text.find(t)) >= 0), default=len(text))
    if not final:
        longest = max(map(len, terminals), default=1)
        for at in range(max(0, len(text) - longest + 1), min(end + 1, len(text))):
            begun = text[at:]
            if any(t.startswith(begun) and t != begun for t in terminals):
                return text[:at], ""
    found = (t for t in terminals if text.startswith(t, end))
    return text[:end], max(found, key=len, default="")

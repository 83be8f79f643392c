"""A model's chat template: messages in, prompt text out, as transformers renders it.

Templates are code that came with a model, so they run in jinja2's immutable sandbox. What
transformers gives them stands here too: `raise_exception`, `strftime_now`, a `tojson` that leaves
HTML characters alone, loop controls and `{% generation %}` blocks.

The sandbox bounds what a template reaches and not how long it works. Each turn of a loop and each
call looks at the clock, and products and powers have a largest size. What a template can still do
is to fill the memory: its process or pod has to bound that.

Templates differ in what they expect of a message: whether a missing content is absent, null or
empty, the name of the reasoning, arguments of calls as objects or as text, content as a text or as
a list of parts. The template renders small chats at load, and each message then gets the first form
in which the template shows all of it. The first of all forms is the one that transformers uses.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import product, takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.errors import BadRequest, ConfigError
from tandem.models.files import first_line, naming, read_json_if_any

RENDER_S_MAX = 5.0  # a conversation takes milliseconds
_DIGITS_MAX = 1 << 20  # of a product or power: bits of a number, elements of a text or list
# A template that meets a shape it does not expect fails as any Python code would.
_PYTHON_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
_ERRORS = (jinja2.TemplateError, MemoryError, RuntimeError, *_PYTHON_ERRORS)
_SPECIAL_TOKENS = tuple(
    f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
NO_OPTIONS: Mapping[str, Any] = {}
# Names of an assistant's reasoning. A message has the first one when it comes here.
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_Message = Mapping[str, Any]
# Messages that probe a template. Mistral's templates want such an id of a call.
_USER = {"role": "user", "content": "a"}
_CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "f", "arguments": {"probedcall": "b"}},
}
_RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": "c"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {}},
    },
}
_PROBED_PARTS = [{"type": "text", "text": "probedone"}, {"type": "text", "text": "probedtwo"}]


class _Kind(NamedTuple):
    """The parts that an assistant's message has."""

    content: str | None  # None or "", as it was sent; "text": any other
    has_reasoning: bool
    has_calls: bool

    def message(self, reasoning: str) -> dict[str, Any]:
        """Returns a message of this kind."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.has_reasoning:
            message[_REASONING_NAMES[0]] = reasoning
        if self.has_calls:
            message["tool_calls"] = [_CALL]
        return message


class _Form(NamedTuple):
    """A form of an assistant's message."""

    # joined: the content is a part of the reasoning. split: the calls are a message of their own.
    layout: Literal["whole", "joined", "split"] = "whole"
    reasoning_names: tuple[str, ...] = _REASONING_NAMES  # (): it is a part of the content
    empty: tuple[str | None, ...] = ()  # the content of a message without any; (): no such key
    has_argument_text: bool = False  # arguments of calls are JSON text, and no objects

    def messages(self, message: _Message) -> list[dict[str, Any]]:
        """Returns the messages that the template gets for one."""
        given = {name: value for name, value in message.items() if value is not None}
        content, calls = given.pop("content", None), given.pop("tool_calls", None)
        reasoning = given.pop(_REASONING_NAMES[0], None)
        if self.layout == "joined":
            if isinstance(content, list):
                content = "\n".join(part["text"] for part in content)
            content, reasoning = None, f"{reasoning}\n\n{content}"
        if reasoning and not self.reasoning_names:
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            content = [{"type": "thinking", "thinking": reasoning}, *(parts or ())]
        first = given | self._content(content)
        if reasoning:
            first |= dict.fromkeys(self.reasoning_names, reasoning)
        if not calls:
            return [first]
        called = {"tool_calls": [self._call(call) for call in calls]}
        if self.layout == "split":
            return [first, given | self._content(None) | called]
        return [first | called]

    def _content(self, content: Any) -> dict[str, Any]:
        if content:
            return {"content": content}
        return {"content": self.empty[0]} if self.empty else {}

    def _call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self.has_argument_text:
            return call
        function = call["function"]
        return {**call, "function": {**function, "arguments": _tojson(function["arguments"])}}


class _Expected(NamedTuple):
    """What a template expects of messages."""

    forms: Mapping[_Kind, _Form]
    takes_text: Mapping[str, bool]  # by role: it shows content that is a text
    takes_parts: Mapping[str, bool]  # by role: it shows content that is a list of parts
    shows_calls: bool  # of earlier answers
    takes_one_call: bool  # a message with several calls shows one of them, or is refused

    def chat(self, messages: Sequence[_Message]) -> list[dict[str, Any]]:
        """Returns the messages that the template gets for those of a chat."""
        if self.takes_one_call:
            messages = _with_one_call_each(messages)
        return [given for message in messages for given in self.given(message)]

    def given(self, message: _Message) -> list[dict[str, Any]]:
        """Returns the messages that the template gets for one. No key is null, unless the template
        wants it so."""
        role, content = message["role"], message.get("content")
        takes_parts = self.takes_parts.get(role, False)
        if isinstance(content, list) and not takes_parts:
            content = "\n".join(part["text"] for part in content)
        elif content and isinstance(content, str) and takes_parts and not self.takes_text[role]:
            content = [{"type": "text", "text": content}]
        message = {**message, "content": content}
        reasoning, calls = message.get(_REASONING_NAMES[0]), message.get("tool_calls")
        if role == "assistant" and (reasoning or calls):
            sent = "text" if content else content and ""
            return self.forms[_Kind(sent, bool(reasoning), bool(calls))].messages(message)
        return [{name: value for name, value in message.items() if value is not None}]


def _with_one_call_each(messages: Sequence[_Message]) -> list[_Message]:
    """Returns messages that have one call each, with the call's result behind it."""
    given: list[_Message] = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            given.append(message)
            continue
        results = list(takewhile(lambda m: m["role"] == "tool", rest))
        del rest[: len(results)]
        for number, call in enumerate(calls):
            said = {"role": message["role"]} if number else message
            given.append({**said, "tool_calls": [call]})
            own = [result for result in results if result.get("tool_call_id") == call["id"]]
            given += own
            results = [result for result in results if result not in own]
        given += results
    return given


class ChatTemplate:
    """One compiled template with the model's special tokens. Threads may share it."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, Any],
        tool_use: ChatTemplate | None = None,
    ) -> None:
        """`special_tokens` are such as bos_token. `tool_use` renders the chats that have tools.
        Raises ConfigError if `source` is no template."""
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # jinja2 compiles it to Python, which has limits of its own
            raise ConfigError(
                f"the model's chat template cannot be compiled: {first_line(error)}"
            ) from error
        self._special_tokens = dict(special_tokens)
        self.source = source
        self.tool_use = tool_use

    @classmethod
    def from_folder(cls, folder: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate | None:
        """Reads the files of templates, else tokenizer_config.json or chat_template.json; None if
        none has a template."""
        special_map, own_file = folder / "special_tokens_map.json", folder / "chat_template.jinja"
        special = read_json_if_any(special_map)
        with naming(special_map if special else folder / "tokenizer_config.json"):
            tokens = _special_tokens(tokenizer_config, special)
        named = None if own_file.is_file() else tokenizer_config.get("chat_template")
        if not (named or own_file.is_file()):  # of a model that reads images, too
            named = read_json_if_any(folder / "chat_template.json").get("chat_template")
        tool_file = folder / "additional_chat_templates" / "tool_use.jinja"
        template = None
        for name, file in (("tool_use", tool_file), ("default", own_file)):
            is_own = file.is_file()
            with naming(file if is_own else folder / "tokenizer_config.json"):
                source = file.read_text(encoding="utf-8") if is_own else _named(named, name)
                earlier, template = template, None
                if source:
                    template = cls(source, tokens, earlier)
                    _ = template._expected  # before the first request needs it
        return template

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that the template reads and does not set, such as `tools` or `enable_thinking`."""
        environment = _environment()
        found = meta.find_undeclared_variables(environment.parse(self.source))
        own = {"messages", *_SPECIAL_TOKENS, *self._special_tokens, *environment.globals}
        return frozenset(found - own) | (self.tool_use.variables if self.tool_use else frozenset())

    def render(
        self,
        messages: Sequence[_Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> str:
        """Renders a chat. Raises BadRequest with the template's words when it refuses it.

        `options` are values for variables of the template. Arguments of tool calls are objects, and
        the name of reasoning is `reasoning_content`.
        """
        if tools and self.tool_use is not None:
            return self.tool_use.render(
                messages, add_generation_prompt=add_generation_prompt, tools=tools, options=options
            )
        given = self._expected.chat(messages)
        try:
            _clock.begin()
            return self._render(given, tools, options, add_generation_prompt=add_generation_prompt)
        except _ERRORS as error:
            raise BadRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error

    def _render(
        self,
        messages: Sequence[_Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] = NO_OPTIONS,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        given = {"documents": None, **self._special_tokens, **options}
        given |= {"messages": messages, "tools": tools}
        return self._template.render(given, add_generation_prompt=add_generation_prompt)

    # What the template expects

    @property
    def takes_system(self) -> bool:
        """True if the template shows a system message."""
        return self._expected.takes_text["system"] or self._expected.takes_parts["system"]

    @property
    def shows_calls(self) -> bool:
        """True if the template shows calls of earlier answers."""
        return self._expected.shows_calls

    @cached_property
    def _plain(self) -> tuple[str, list[dict[str, Any]] | None]:
        """The rendered text of the smallest chat, and the tools that it has. Some templates render
        nothing without tools."""
        for tools in (None, [_TOOL]):
            try:
                return self._render([_USER], tools), tools
            except _ERRORS:
                continue
        return "", None

    @cached_property
    def _expected(self) -> _Expected:
        _clock.begin()  # one bound for all of the small chats
        kinds = map(_Kind._make, product((None, "", "text"), (False, True), (False, True)))
        forms = {kind: self._form(kind) for kind in kinds}
        called = _Kind(None, has_reasoning=False, has_calls=True)
        shows_calls = self._num_shown(called, forms[called]) == 1
        takes_text, takes_parts = {}, {}
        for role in ("system", "user", "assistant"):
            text = self._probed(role, "probedone")
            takes_text[role] = "probedone" in text
            parts = self._probed(role, _PROBED_PARTS)
            # A template that adds the list itself to the text shows its quotes as well.
            are_shown = all(p["text"] in parts for p in _PROBED_PARTS)
            takes_parts[role] = are_shown and not any(q + "probedone" in parts for q in "'\"")
        expected = _Expected(forms, takes_text, takes_parts, shows_calls, takes_one_call=False)
        takes_one = not self._shows_two_calls(expected)
        one_each = expected._replace(takes_one_call=True)
        return one_each if takes_one and self._shows_two_calls(one_each) else expected

    def _probed(self, role: str, content: Any) -> str:
        """Returns a chat with such a message; empty if the template refuses it."""
        around = {"system": ([], [_USER]), "assistant": ([_USER], [])}
        before, after = around.get(role, ([], []))
        try:
            chat = [*before, {"role": role, "content": content}, *after]
            return self._render(chat, self._plain[1])
        except _ERRORS:
            return ""

    def _shows_two_calls(self, expected: _Expected) -> bool:
        """Returns whether the template shows both calls of one message."""
        arguments = {"name": "f", "arguments": {"probedtwo": "b"}}
        calls = [_CALL, {**_CALL, "id": "abcdefghj", "function": arguments}]
        results = [_RESULT, {**_RESULT, "tool_call_id": "abcdefghj"}]
        chat = expected.chat([_USER, {"role": "assistant", "tool_calls": calls}, *results])
        try:
            rendered = self._render(chat, self._plain[1])
        except _ERRORS:
            return False
        return "probedcall" in rendered and "probedtwo" in rendered

    def _form(self, kind: _Kind) -> _Form:
        """Returns the first form in which the template shows most of such a message. A template
        that shows calls or reasoning without the content does so in transformers, too."""
        best, most = _Form(), -1
        tried: list[Any] = []
        for form in self._possible_forms(kind):
            given = form.messages(kind.message("probedthought"))
            if given in tried:
                continue
            tried.append(given)
            if (num_shown := self._num_shown(kind, form)) > most:
                best, most = form, num_shown
            if most == kind.has_reasoning + kind.has_calls:
                break
        return best

    def _possible_forms(self, kind: _Kind) -> Iterator[_Form]:
        layouts: list[Literal["whole", "joined", "split"]] = ["whole"]
        if kind.content and kind.has_calls:
            layouts += ["joined", "split"] if kind.has_reasoning else ["split"]
        names: list[tuple[str, ...]] = [(n,) for n in _REASONING_NAMES if n in self.source]
        names += [()] if ("thinking",) in names else []
        empties: list[tuple[str | None, ...]] = [(), (None,), ("",)]
        if kind.content == "":
            empties = [("",), (), (None,)]
        for form in product(layouts, [_REASONING_NAMES, *names], empties, (False, True)):
            yield _Form(*form)

    def _num_shown(self, kind: _Kind, form: _Form) -> int:
        """Returns how many of reasoning and calls the template shows; -1 if it refuses the
        message, or prints a content that is null."""
        given = form.messages(kind.message("probedthought"))
        if kind.has_calls:
            chat = [_USER, *given, _RESULT]
        else:  # templates treat the last answer in another way than earlier ones
            chat = [_USER, *form.messages(kind.message("before")), _USER, *given]
        plain, tools = self._plain
        try:
            rendered = self._render(chat, tools)
        except _ERRORS:
            return -1

        def has_more(text: str) -> bool:
            return rendered.count(text) > plain.count(text)

        if has_more("None"):
            return -1
        # Objects as Python prints them, and texts that became JSON strings, are no calls.
        shows_calls = has_more("probedcall") and not (has_more("{'") or has_more('\\"'))
        shows_reasoning = rendered.count("probedthought") == 1
        if form.layout == "joined" and not shows_reasoning:
            return -1
        if not form.reasoning_names and any(q + "probedthought" in rendered for q in "'\""):
            return -1
        return (kind.has_calls and shows_calls) + shows_reasoning


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; here it is only its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Clock(threading.local):
    """The time by which the template that this thread renders has to end."""

    late_at = 0.0

    def begin(self) -> None:
        self.late_at = time.monotonic() + RENDER_S_MAX

    def check(self) -> str:
        """Raises TemplateError if the template takes too long; else adds no text."""
        if time.monotonic() > self.late_at:
            raise jinja2.TemplateError(f"it does not end within {RENDER_S_MAX:g} s")
        return ""


_clock = _Clock()


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a bound on the time that a template takes."""

    intercepted_binops = frozenset(("*", "**"))
    check_clock = staticmethod(_clock.check)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            # An attribute of the environment, which no variable of the template can hide.
            check = nodes.Call(nodes.EnvironmentAttribute("check_clock"), [], [], None, None)
            loop.body.insert(0, nodes.Output([check]))
        return template.set_environment(self)  # type: ignore[return-value]

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        _clock.check()
        return super().call(context, called, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _digits(operator, left, right) > _DIGITS_MAX:
            raise jinja2.TemplateError(f"its {operator} makes something too large")
        return super().call_binop(context, operator, left, right)


def _digits(operator: str, left: Any, right: Any) -> int:
    """Returns about how long the result is: bits of a number, or elements of a text or list."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        return bits * abs(right) if operator == "**" else bits + right.bit_length()
    for repeated, times in ((left, right), (right, left)):
        if isinstance(repeated, str | list | tuple) and isinstance(times, int):
            return len(repeated) * times
    return 0


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # type: ignore[arg-type]


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _named(template: str | list[dict[str, str]] | None, name: str) -> str | None:
    """Returns the template of a tokenizer_config.json that has a name. The only one is the
    default."""
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}.get(name)
    return template if name == "default" else None


def _special_tokens(
    tokenizer_config: Mapping[str, Any], special_map: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the special tokens that templates may name. Where the first file lists added tokens,
    transformers does not look into special_tokens_map.json; else that one counts more."""
    files = [tokenizer_config, special_map]
    if "added_tokens_decoder" not in tokenizer_config:
        files.reverse()
    tokens: dict[str, Any] = {}
    for file in files:
        extra = file.get("extra_special_tokens")
        named = {n: t for n, t in file.items() if n.endswith("_token") and not isinstance(t, bool)}
        named |= extra if isinstance(extra, dict) else {}
        for name, token in named.items():
            if token is not None:
                tokens.setdefault(name, _content_of(token))
        further = file.get("additional_special_tokens") or (
            extra if isinstance(extra, list) else []
        )
        if further:
            tokens.setdefault("additional_special_tokens", [_content_of(t) for t in further])
    return tokens


def _content_of(token: Any) -> Any:
    return token["content"] if isinstance(token, dict) else token

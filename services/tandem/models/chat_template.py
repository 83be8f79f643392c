"""A model's chat template: messages in, prompt text out, as transformers renders it.

Templates are code that came with a model, so they run in jinja2's immutable sandbox. What
transformers gives them stands here too: `raise_exception`, `strftime_now`, a `tojson` that leaves
HTML characters alone, loop controls and `{% generation %}` blocks.

The sandbox bounds what a template reaches and not how long it works. Each turn of a loop and each
call looks at the clock, and products and powers have a largest size. What a template can still do
is to fill the memory: its process or pod has to bound that.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.errors import BadRequest, ConfigError
from tandem.models.broken_files import first_line, naming

RENDER_S_MAX = 5.0  # a conversation takes milliseconds
_DIGITS_MAX = 1 << 20  # of a product or power: bits of a number, elements of a text or list
# A template that meets a shape it does not expect fails as any Python code would.
_PYTHON_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
_ROLES = frozenset(("messages", "bos_token", "eos_token", "unk_token", "pad_token"))
NO_OPTIONS: Mapping[str, Any] = {}
# A chat with a call, to find out how a template takes arguments. Mistral's want such an id.
_PROBE: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "abcdefghi",
                "type": "function",
                "function": {"name": "f", "arguments": {"probed": "b"}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": "c"},
]


class ChatTemplate:
    """One compiled template with the model's special tokens."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are such as bos_token. Raises ConfigError if `source` is no template."""
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # jinja2 compiles it to Python, which has limits of its own
            raise ConfigError(
                f"the model's chat template cannot be compiled: {first_line(error)}"
            ) from error
        self._special_tokens = dict(special_tokens)
        self.source = source

    @classmethod
    def from_folder(cls, folder: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate | None:
        """Reads chat_template.jinja, else tokenizer_config.json; None if neither has a template."""
        file = folder / "chat_template.jinja"
        own_file = file if file.is_file() else folder / "tokenizer_config.json"
        with naming(own_file):
            if own_file is file:
                source: str | None = file.read_text(encoding="utf-8")
            else:
                source = _default_of(tokenizer_config.get("chat_template"))
            if not source:
                return None
            return cls(source, _special_tokens(tokenizer_config))

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that the template reads and does not set, such as `tools` or `enable_thinking`."""
        environment = _environment()
        found = meta.find_undeclared_variables(environment.parse(self.source))
        return frozenset(found - set(environment.globals) - _ROLES)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> str:
        """Renders a chat. Raises BadRequest with the template's words when it refuses it.

        `options` are values for variables of the template. The arguments of tool calls are dicts.
        """
        if self._takes_argument_text:
            messages = [_with_argument_text(message) for message in messages]
        try:
            return self._render(messages, tools, add_generation_prompt, options)
        except (jinja2.TemplateError, MemoryError, RecursionError, *_PYTHON_ERRORS) as error:
            raise BadRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> str:
        _clock.begin()
        given = {"documents": None, **self._special_tokens, **options}
        given |= {"messages": messages, "tools": tools}
        return self._template.render(given, add_generation_prompt=add_generation_prompt)

    @cached_property
    def _takes_argument_text(self) -> bool:
        """True if arguments of tool calls must be JSON text. transformers passes dicts, which some
        templates cannot add to text, and others print as Python does."""
        with_text = [_with_argument_text(message) for message in _PROBE]
        for messages, fault in ((_PROBE, "{'"), (with_text, '\\"')):
            try:
                rendered = self._render(messages, None, add_generation_prompt=False)
            except (jinja2.TemplateError, MemoryError, RecursionError, *_PYTHON_ERRORS):
                continue
            if "probed" in rendered and fault not in rendered:
                return messages is with_text
        return False


def _with_argument_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the message with the arguments of its tool calls as JSON."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        text = _tojson(function["arguments"])
        calls.append({**call, "function": {**function, "arguments": text}})
    return {**message, "tool_calls": calls}


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


def _default_of(template: str | list[dict[str, str]] | None) -> str | None:
    """Returns the template of a tokenizer_config.json: its only one, or the one called default."""
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    roles = sorted(_ROLES - {"messages"})
    tokens = {role: token for role in roles if (token := tokenizer_config.get(role)) is not None}
    return {r: t["content"] if isinstance(t, dict) else t for r, t in tokens.items()}

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
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
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

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        """Renders a chat. Raises BadRequest with the template's words when it refuses it."""
        _clock.begin()
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, MemoryError, RecursionError, *_PYTHON_ERRORS) as error:
            raise BadRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error


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
    roles = ("bos_token", "eos_token", "unk_token", "pad_token")
    tokens = {role: token for role in roles if (token := tokenizer_config.get(role)) is not None}
    return {r: t["content"] if isinstance(t, dict) else t for r, t in tokens.items()}

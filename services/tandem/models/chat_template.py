"""Converts the messages of a chat to the prompt text with a model's chat template, as transformers
does.

A template is code that comes with a model, so it runs in jinja2's immutable sandbox. This module
defines what transformers offers to templates: `raise_exception`, `strftime_now`, a `tojson` that
does not escape HTML characters, loop controls and `{% generation %}` blocks.

The sandbox limits what a template can access, but not how long the template runs. Each loop
iteration, each call and each product therefore checks a deadline, and the results of products and
powers have a maximum size. Nothing here limits the memory of a template: the process or the pod
needs a memory limit.

Templates expect messages in different forms:
- If a message has no content, the key `content` is absent, null or empty.
- The key of an assistant's reasoning is `reasoning_content`, `thinking` or `reasoning`.
- The arguments of tool calls are objects or JSON text.
- `content` is a string or a list such as [{"type": "text", "text": "a"}].
- System messages come anywhere, or one comes at the beginning.

When a template is loaded, small test chats are rendered in each form, and a form scores one point
if the template rendered the reasoning of the test message, and one if it rendered the tool calls.
The messages of clients are later passed in the form with the highest score. Of forms with equal
scores, the first one is used. The first form is the one that transformers uses.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from hashlib import sha256
from itertools import chain, product, takewhile
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
from tandem.models.tokenizer_settings import is_token, read_tokenizer_settings

RENDER_S_MAX = 5.0  # maximum seconds to render one chat; typical chats take milliseconds
# Maximum size of the result of a product or power. The size is the number of bits of a number, or
# the number of elements of a string or list.
_RESULT_SIZE_MAX = 1 << 20
# Errors that a template raises if the messages contain data of a type that it does not expect.
_PYTHON_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
_ERRORS = (jinja2.TemplateError, MemoryError, RuntimeError, *_PYTHON_ERRORS)
_SPECIAL_TOKENS = tuple(
    f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
_TEMPLATES = Path(__file__).parent / "templates"
# model_type of config.json -> template
_BUILT_IN = {"deepseek_v32": "deepseek_v32.jinja", "deepseek_v4": "deepseek_v4.jinja"}
NO_OPTIONS: Mapping[str, Any] = {}
# Keys under which templates read an assistant's reasoning. Messages that are passed to `render` use
# the first of these keys.
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_Message = Mapping[str, Any]
# Messages of the test chats. Mistral's templates require call ids of nine letters and digits.
_USER: _Message = {"role": "user", "content": "a"}
_USER_OF_PARTS: _Message = {"role": "user", "content": [{"type": "text", "text": "a"}]}
_CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "f", "arguments": {"probedcall": "b"}},
}
_CALLED = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": "probedresult"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {}},
    },
}
_PROBED_PARTS = [{"type": "text", "text": "probedone"}, {"type": "text", "text": "probedtwo"}]


class _SmallestChat(NamedTuple):
    """The smallest chat that a template renders. Some templates render nothing without tools, or do
    not accept a string as content."""

    text: str
    user: _Message
    tools: list[dict[str, Any]] | None


class _MessageKind(NamedTuple):
    """A kind of assistant message. Kinds differ in which of the fields content, reasoning and tool
    calls the message has."""

    content: str | None  # None: no content. "": empty content. "text": content that is not empty.
    has_reasoning: bool
    has_calls: bool

    def message(self, reasoning: str) -> dict[str, Any]:
        """Returns a test message of this kind. `reasoning` is the text of the message's reasoning;
        it is ignored for kinds without reasoning."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.has_reasoning:
            message[_REASONING_NAMES[0]] = reasoning
        if self.has_calls:
            message["tool_calls"] = [_CALL]
        return message


class _MessageForm(NamedTuple):
    """One way to pass an assistant's message to a template."""

    # "whole": one message with content, reasoning and tool calls in separate fields.
    # "joined": one message; the content is appended to the text of the reasoning.
    # "split": two messages; the second one has the tool calls.
    layout: Literal["whole", "joined", "split"] = "whole"
    # Keys under which the reasoning is passed. (): the reasoning is passed as a part of `content`.
    reasoning_names: tuple[str, ...] = _REASONING_NAMES
    # How a message without content is passed. (None,): the key `content` is null. ("",): it is the
    # empty string. (): the message has no key `content`.
    empty: tuple[str | None, ...] = ()
    has_argument_text: bool = False  # True: arguments of calls are JSON text. False: objects.

    def messages(self, message: _Message) -> list[dict[str, Any]]:
        """Converts one message to this form. The result is two messages if the layout is "split"
        and the message has tool calls, else one."""
        given = {name: value for name, value in message.items() if value is not None}
        content = given.pop("content", None)
        calls = given.pop("tool_calls", None)
        reasoning = given.pop(_REASONING_NAMES[0], None)
        if self.layout == "joined":
            if isinstance(content, list):
                content = _text_of(content)
            reasoning = f"{reasoning}\n\n{content}"
            content = None
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


class _TemplateTraits(NamedTuple):
    """The properties of a template that decide how messages are passed to it."""

    forms: Mapping[_MessageKind, _MessageForm]
    takes_text: Mapping[str, bool]  # role -> True if the template renders content that is a string
    takes_parts: Mapping[str, bool]  # role -> True if the template renders content that is a list
    shows_calls: bool  # True: the template renders tool calls of earlier answers.
    shows_results: bool  # True: the template renders the results of tool calls.
    # True: the template renders at most one tool call of a message, so a message with several calls
    # is split into messages with one call each.
    takes_one_call: bool
    # True: call ids may have any form. False: nine letters and digits, as Mistral requires.
    takes_all_ids: bool
    refuses_systems: bool  # True: the template refuses all system messages.
    # True: the template renders a system message without any of the user. False: it becomes the
    # user's.
    takes_system_alone: bool
    # True: the template renders two system messages at the beginning. False: they become one.
    takes_two_systems: bool
    # True: the template renders system messages after others. False: they become the user's.
    takes_later_systems: bool
    # True: the template renders two messages of the user in a row. False: they become one.
    takes_two_users: bool
    # True: the template renders a message of the user after the result of a tool. False: it becomes
    # a part of the result.
    takes_user_after_result: bool

    def chat(self, messages: Sequence[_Message]) -> list[dict[str, Any]]:
        """Returns the messages that the template receives for a chat."""
        takes_systems = self.takes_two_systems and self.takes_later_systems
        takes_users = self.takes_two_users and self.takes_user_after_result
        if not (takes_systems and self.takes_system_alone and takes_users):
            messages = self._with_known_rows(messages)
        if self.takes_one_call:
            messages = _with_one_call_each(messages)
        if not self.takes_all_ids:
            messages = list(map(_with_short_ids, messages))
        return [given for message in messages for given in self.given(message)]

    def _with_known_rows(self, messages: Sequence[_Message]) -> list[_Message]:
        """Joins the system messages at the beginning and the user's messages in a row, and turns
        later system messages, or all, into the user's, as far as the template requires it. A
        message that was turned is joined with the user's messages beside it."""
        given: list[_Message] = []
        has_user = any(message["role"] == "user" for message in messages)
        takes_first = not self.refuses_systems and (has_user or self.takes_system_alone)
        has_begun = False  # whether a message came that is not the system's
        joins = False  # whether the last message in `given` is joined with the next of its role
        for message in messages:
            is_system = message["role"] == "system"
            has_begun |= not is_system
            takes_it = self.takes_later_systems if has_begun else takes_first
            is_turned = is_system and not takes_it
            if is_turned:
                message = {**message, "role": "user"}
            role = message["role"]
            last_role = given[-1]["role"] if given else ""
            is_like_last = last_role == role and role in ("system", "user")
            continues = (last_role, role) == ("tool", "user") and not self.takes_user_after_result
            if continues or (is_like_last and (joins or is_turned)):
                given[-1] = _joined(given[-1], message)
            else:
                given.append(message)
            takes_two = self.takes_two_users if has_begun else self.takes_two_systems
            joins = is_turned or not takes_two
        return given

    def given(self, message: _Message) -> list[dict[str, Any]]:
        """Returns the messages that the template receives for one message. The result has two
        messages if the template needs the tool calls in a separate message, otherwise one. Keys
        whose value is null are left out unless the template expects null."""
        role = message["role"]
        content = message.get("content")
        takes_parts = self.takes_parts.get(role, False)
        if isinstance(content, list) and not takes_parts:
            content = _text_of(content)
        reasoning = message.get(_REASONING_NAMES[0])
        calls = message.get("tool_calls")
        is_alone = not (reasoning or calls)
        is_text = isinstance(content, str) and bool(content or is_alone)
        if is_text and takes_parts and not self.takes_text[role]:
            content = [{"type": "text", "text": content}]
        message = {**message, "content": content}
        if role == "assistant" and not is_alone:
            sent = "text" if content else content and ""
            return self.forms[_MessageKind(sent, bool(reasoning), bool(calls))].messages(message)
        return [{name: value for name, value in message.items() if value is not None}]


def _text_of(content: Sequence[Mapping[str, Any]]) -> str:
    """Returns the texts of a message's parts; images are left out."""
    return "\n".join(part["text"] for part in content if "text" in part)


def _joined(first: _Message, second: _Message) -> _Message:
    """Returns one message with the contents of two messages of one role."""
    contents = [message["content"] for message in (first, second) if message["content"]]
    if all(isinstance(content, str) for content in contents):
        return {**first, "content": "\n\n".join(contents)}
    parts = [
        [{"type": "text", "text": content}] if isinstance(content, str) else content
        for content in contents
    ]
    return {**first, "content": [*chain(*parts)]}


def _with_one_call_each(messages: Sequence[_Message]) -> list[_Message]:
    """Splits each message with several tool calls into messages with one call each, and moves the
    results: (calls 1 and 2), result 1, result 2 become (call 1), result 1, (call 2), result 2."""
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


def _with_short_ids(message: _Message) -> _Message:
    """Returns the message with call ids of nine letters and digits. An id of another form is
    replaced by nine hexadecimal digits of the id's hash."""
    changed = dict(message)
    if calls := message.get("tool_calls"):
        changed["tool_calls"] = [{**call, "id": _short_id(call["id"])} for call in calls]
    if call_id := message.get("tool_call_id"):
        changed["tool_call_id"] = _short_id(call_id)
    return changed


def _short_id(call_id: str) -> str:
    return call_id if _SHORT_ID.fullmatch(call_id) else sha256(call_id.encode()).hexdigest()[:9]


class ChatTemplate:
    """A compiled template with the model's special tokens. It is safe to share between threads."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, Any],
        tool_use: ChatTemplate | None = None,
    ) -> None:
        """Compiles `source`; raises ConfigError if it is not a valid template.

        `special_tokens` maps names such as bos_token to their text. `tool_use` is a second template
        that renders the chats with tools."""
        try:
            self._template = _environment().from_string(source)
        # jinja2 generates Python code, so errors of the Python compiler are possible, too.
        except Exception as error:
            raise ConfigError(
                f"the model's chat template cannot be compiled: {first_line(error)}"
            ) from error
        self._special_tokens = dict(special_tokens)
        self.source = source
        self.tool_use = tool_use

    @classmethod
    def from_folder(cls, folder: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate | None:
        """Reads the chat template of a model folder. If it has none, the built-in template of its
        model_type is used; returns None if there is none, either.

        The default template is in chat_template.jinja, else in `tokenizer_config`, else in
        chat_template.json. A second template for chats with tools is in
        additional_chat_templates/tool_use.jinja, or in the JSON file of the default template.
        Raises ConfigError naming the file that has an invalid template."""
        own_file = folder / "chat_template.jinja"
        special = read_tokenizer_settings(folder / "special_tokens_map.json")
        tokens = _special_tokens(tokenizer_config, special)
        settings_file = folder / "tokenizer_config.json"
        named = None if own_file.is_file() else tokenizer_config.get("chat_template")
        if not (named or own_file.is_file()):
            # Multimodal models keep their template in chat_template.json.
            settings_file = folder / "chat_template.json"
            named = read_tokenizer_settings(settings_file).get("chat_template")
        tool_file = folder / "additional_chat_templates" / "tool_use.jinja"
        template = None
        for name, file in (("tool_use", tool_file), ("default", own_file)):
            is_own = file.is_file()
            with naming(file if is_own else settings_file):
                source = (
                    file.read_text(encoding="utf-8") if is_own else _template_named(named, name)
                )
                earlier = template
                template = None
                if source:
                    template = cls(source, tokens, earlier)
                    # The traits are computed now, so that the first request does not wait for them.
                    _ = template._traits
        return template or _built_in(folder, tokens)

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of variables that the template reads and does not set, such as `tools` or
        `enable_thinking`."""
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
        """Returns the prompt text of a chat. Raises BadRequest with the template's message if the
        template refuses the chat.

        `options` sets variables of the template. In `messages`, arguments of tool calls are
        objects, and reasoning has the key `reasoning_content`.
        """
        if tools and self.tool_use is not None:
            return self.tool_use.render(
                messages, add_generation_prompt=add_generation_prompt, tools=tools, options=options
            )
        given = self._traits.chat(messages)
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

    @property
    def takes_system(self) -> bool:
        """True if the template renders system messages."""
        return self._traits.takes_text["system"] or self._traits.takes_parts["system"]

    @property
    def shows_calls(self) -> bool:
        """True if the template renders tool calls of earlier answers."""
        return self._traits.shows_calls

    @property
    def shows_results(self) -> bool:
        """True if the template renders results of tool calls (messages with the role `tool`)."""
        return self._traits.shows_results

    @cached_property
    def _smallest_chat(self) -> _SmallestChat:
        """The smallest chat that this template renders."""
        for user, tools in product((_USER, _USER_OF_PARTS), (None, [_TOOL])):
            with suppress(*_ERRORS):
                return _SmallestChat(self._render([user], tools), user, tools)
        return _SmallestChat("", _USER, None)

    @cached_property
    def _traits(self) -> _TemplateTraits:
        _clock.begin()  # All test chats share one deadline.
        kinds = map(_MessageKind._make, product((None, "", "text"), (False, True), (False, True)))
        forms = {kind: self._best_form(kind) for kind in kinds}
        called = _MessageKind(None, has_reasoning=False, has_calls=True)
        shows_calls = self._num_shown(called, forms[called]) == 1
        takes_text = {}
        takes_parts = {}
        for role in ("system", "user", "assistant"):
            text = self._render_probe(role, "probedone")
            takes_text[role] = "probedone" in text
            parts = self._render_probe(role, _PROBED_PARTS)
            # A template that does not support a list as content prints the Python list, such as
            # [{'type': 'text', 'text': 'probedone'}]. Then there is a quote before "probedone".
            are_shown = all(p["text"] in parts for p in _PROBED_PARTS)
            takes_parts[role] = are_shown and not any(q + "probedone" in parts for q in "'\"")
        traits = _TemplateTraits(
            forms,
            takes_text,
            takes_parts,
            shows_calls,
            shows_results=True,
            takes_one_call=False,
            takes_all_ids=True,
            refuses_systems=not any(
                self._render_probe("system", content) for content in ("probedone", _PROBED_PARTS)
            ),
            takes_system_alone=True,
            takes_two_systems=True,
            takes_later_systems=True,
            takes_two_users=True,
            takes_user_after_result=True,
        )
        traits = traits._replace(shows_results=self._shows_results(traits))
        user, answer = self._smallest_chat.user, {"role": "assistant", "content": "b"}
        first, second, third = ({"role": "system", "content": f"probed{n}"} for n in "abc")
        asked, further = ({"role": "user", "content": f"probed{n}"} for n in "de")
        later = (first, user, second, answer, third, user)
        traits = traits._replace(
            takes_system_alone=self._shows_probes(traits, first),
            takes_two_systems=self._shows_probes(traits, first, second, user),
            takes_later_systems=self._shows_probes(traits, *later),
            takes_two_users=self._shows_probes(traits, asked, further, answer, user),
        )
        result = (user, _CALLED, _RESULT)
        takes_user = self._shows_probes(traits, *result, asked)
        traits = traits._replace(
            takes_user_after_result=takes_user or not self._shows_probes(traits, *result)
        )
        takes_one = not self._shows_two_calls(traits)
        one_each = traits._replace(takes_one_call=True)
        if takes_one and self._shows_two_calls(one_each):
            traits = one_each
        takes_short = self._takes_call(traits, "abcdefghi")
        takes_all = self._takes_call(traits, "call_0123456789abcdef") or not takes_short
        return traits._replace(takes_all_ids=takes_all)

    def _shows_probes(self, traits: _TemplateTraits, *messages: _Message) -> bool:
        """Returns whether the template renders all test texts of a chat."""
        try:
            rendered = self._render(traits.chat(messages), self._smallest_chat.tools)
        except _ERRORS:
            return False
        texts = (str(message["content"]) for message in messages)
        return all(text in rendered for text in texts if text.startswith("probed"))

    def _shows_results(self, traits: _TemplateTraits) -> bool:
        """Returns whether the template renders the result of a tool call.

        There are two test chats. In one the result follows a call, and in the other the result
        follows an answer without calls. If the template refuses both, the function also returns
        True: such a template refuses a client's result with an error, so the result is not dropped
        silently."""
        called = [traits.given(_CALLED)] if traits.shows_calls else []
        shown = []
        for before in (*called, [{"role": "assistant", "content": "b"}]):
            with suppress(*_ERRORS):
                shown.append(
                    "probedresult"
                    in self._render(
                        [self._smallest_chat.user, *before, _RESULT], self._smallest_chat.tools
                    )
                )
        return any(shown) or not shown

    def _takes_call(self, traits: _TemplateTraits, call_id: str) -> bool:
        """Returns whether the template accepts a tool call with the id `call_id`."""
        call = {**_CALLED, "tool_calls": [_CALL | {"id": call_id}]}
        chat = traits.chat([self._smallest_chat.user, call, {**_RESULT, "tool_call_id": call_id}])
        try:
            self._render(chat, self._smallest_chat.tools)
        except _ERRORS:
            return False
        return True

    def _render_probe(self, role: str, content: Any) -> str:
        """Renders a chat with one message of this role and content; returns "" if the template
        refuses it."""
        around = {
            "system": ([], [self._smallest_chat.user]),
            "assistant": ([self._smallest_chat.user], []),
        }
        before, after = around.get(role, ([], []))
        try:
            chat = [*before, {"role": role, "content": content}, *after]
            return self._render(chat, self._smallest_chat.tools)
        except _ERRORS:
            return ""

    def _shows_two_calls(self, traits: _TemplateTraits) -> bool:
        """Returns whether the template renders both calls of a message with two calls."""
        arguments = {"name": "f", "arguments": {"probedtwo": "b"}}
        calls = [_CALL, {**_CALL, "id": "abcdefghj", "function": arguments}]
        results = [_RESULT, {**_RESULT, "tool_call_id": "abcdefghj"}]
        chat = traits.chat(
            [self._smallest_chat.user, {"role": "assistant", "tool_calls": calls}, *results]
        )
        try:
            rendered = self._render(chat, self._smallest_chat.tools)
        except _ERRORS:
            return False
        return "probedcall" in rendered and "probedtwo" in rendered

    def _best_form(self, kind: _MessageKind) -> _MessageForm:
        """Returns the form with the highest score (`_num_shown`) for messages of this kind. Of
        forms with equal scores, the first one is returned. Content does not count, because a
        template that drops content does so in transformers, too."""
        best = _MessageForm()
        most = -1
        tried: list[Any] = []
        for form in self._possible_forms(kind):
            given = form.messages(kind.message("probedthought"))
            if given in tried:
                continue
            tried.append(given)
            if (num_shown := self._num_shown(kind, form)) > most:
                best = form
                most = num_shown
            if most == kind.has_reasoning + kind.has_calls:
                break
        return best

    def _possible_forms(self, kind: _MessageKind) -> Iterator[_MessageForm]:
        layouts: list[Literal["whole", "joined", "split"]] = ["whole"]
        if kind.content and kind.has_calls:
            layouts += ["joined", "split"] if kind.has_reasoning else ["split"]
        names: list[tuple[str, ...]] = [(n,) for n in _REASONING_NAMES if n in self.source]
        names += [()] if ("thinking",) in names else []
        empties: list[tuple[str | None, ...]] = [(), (None,), ("",)]
        if kind.content == "":
            empties = [("",), (), (None,)]
        for form in product(layouts, [_REASONING_NAMES, *names], empties, (False, True)):
            yield _MessageForm(*form)

    def _num_shown(self, kind: _MessageKind, form: _MessageForm) -> int:
        """Returns the score of a form: 1 if the template renders the reasoning, plus 1 if it
        renders the tool calls. Returns -1 if the form is unusable, for example because the
        template refuses the message or prints null as text."""
        given = form.messages(kind.message("probedthought"))
        if kind.has_calls:
            chat = [self._smallest_chat.user, *given, _RESULT]
        else:
            # The message under test is the last answer: templates often omit the reasoning of
            # earlier answers.
            chat = [
                self._smallest_chat.user,
                *form.messages(kind.message("before")),
                self._smallest_chat.user,
                *given,
            ]
        plain, _, tools = self._smallest_chat
        try:
            rendered = self._render(chat, tools)
        except _ERRORS:
            return -1

        def has_more(text: str) -> bool:
            return rendered.count(text) > plain.count(text)

        if has_more("None"):
            return -1
        # A call is not counted if its arguments are wrong: printed as a Python dict, which contains
        # {', or encoded as JSON twice, which contains \".
        shows_calls = has_more("probedcall") and not (has_more("{'") or has_more('\\"'))
        shows_reasoning = rendered.count("probedthought") == 1
        if form.layout == "joined" and not shows_reasoning:
            return -1
        if not form.reasoning_names and any(q + "probedthought" in rendered for q in "'\""):
            return -1
        return (kind.has_calls and shows_calls) + shows_reasoning


class _Generation(Extension):
    """Implements `{% generation %}`: the body is rendered unchanged, in a scope of its own.
    Templates mark the assistant's text with this tag for training."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Clock(threading.local):
    """The deadline of the template that the current thread renders."""

    late_at = 0.0

    def begin(self) -> None:
        self.late_at = time.monotonic() + RENDER_S_MAX

    def check(self) -> str:
        """Raises TemplateError if the deadline has passed. Returns "", because each loop iteration
        prints the result of this call into the prompt."""
        if time.monotonic() > self.late_at:
            raise jinja2.TemplateError(f"the template takes more than {RENDER_S_MAX:g} s to render")
        return ""


_clock = _Clock()


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a limit on running time and on the size of products and powers."""

    intercepted_binops = frozenset(("*", "**"))
    check_clock = staticmethod(_clock.check)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            # The check is an attribute of the environment and no template variable, because a
            # template could assign another value to a variable.
            check = nodes.Call(nodes.EnvironmentAttribute("check_clock"), [], [], None, None)
            loop.body.insert(0, nodes.Output([check]))
        return template.set_environment(self)  # type: ignore[return-value]

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        _clock.check()
        return super().call(context, called, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _clock.check()
        if _result_size(operator, left, right) > _RESULT_SIZE_MAX:
            raise jinja2.TemplateError(
                f"the result of the template's operator {operator} is too large"
            )
        return super().call_binop(context, operator, left, right)


def _result_size(operator: str, left: Any, right: Any) -> int:
    """Estimates the size of `left * right` or `left ** right`: the bits of a number, or the
    elements of a string or list."""
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


def _built_in(folder: Path, tokens: Mapping[str, Any]) -> ChatTemplate | None:
    """Returns the template of a family whose checkpoints have Python code in place of one."""
    config = read_json_if_any(folder / "config.json")
    file = _BUILT_IN.get(str(config.get("model_type")))
    if file is None:
        return None
    template = ChatTemplate((_TEMPLATES / file).read_text(encoding="utf-8"), tokens)
    _ = template._traits
    return template


def _template_named(template: str | list[dict[str, str]] | None, name: str) -> str | None:
    """Returns the template called `name` from a value of `chat_template`, which is one template or
    a list of named ones. A single template has the name "default"."""
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}.get(name)
    return template if name == "default" else None


def _special_tokens(
    tokenizer_config: Mapping[str, Any], special_map: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the special tokens that templates may use.

    As in transformers, tokenizer_config.json has priority over special_tokens_map.json only if
    tokenizer_config.json lists added tokens."""
    files = [tokenizer_config, special_map]
    if "added_tokens_decoder" not in tokenizer_config:
        files.reverse()
    tokens: dict[str, Any] = {}
    for file in files:
        extra = file.get("extra_special_tokens")
        named = {name: token for name, token in file.items() if name.endswith("_token")}
        named |= extra if isinstance(extra, dict) else {}
        for name, token in named.items():
            # The names of some other settings, such as add_bos_token, end in _token, too.
            if is_token(token):
                tokens.setdefault(name, _content_of(token))
        further = file.get("additional_special_tokens") or (
            extra if isinstance(extra, list) else []
        )
        if further:
            tokens.setdefault("additional_special_tokens", [_content_of(t) for t in further])
    return tokens


def _content_of(token: Any) -> Any:
    return token["content"] if isinstance(token, dict) else token

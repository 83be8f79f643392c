"""The formats in which models write tool calls and reasoning, as data for `machine.py`.

Each format follows the public description of its model family: model cards and chat templates.
"""

# DeepSeek's tokens have full-width bars.
# ruff: noqa: RUF001

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tandem.router.parsers.literal_text import GEMMA, PYTHON, Notation
from tandem.router.parsers.machine import State, Text

_KIMI_NAME = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


def call_id(_written: str) -> str:
    return f"call_{secrets.token_hex(12)}"


def mistral_call_id(_written: str) -> str:
    """Returns a random id of nine characters, because Mistral's templates refuse other ids."""
    return secrets.token_hex(5)[:9]


def kimi_call_id(written: str) -> str:
    """Returns the id that the model wrote, such as `functions.find:0`, or else a random id."""
    return written if written.startswith("functions.") else call_id(written)


def _as_written(name: str) -> str:
    return name


def _kimi_name(written: str) -> str:
    found = _KIMI_NAME.fullmatch(written)
    return found[1] if found else written


def _harmony_name(written: str) -> str:
    return written.removeprefix("functions.")


class NestedValues(NamedTuple):
    """How a model writes the values of arguments, if it writes objects and arrays not as JSON.

    The pairs of an object are written as those of the arguments. Numbers are written as in JSON.
    """

    quote: str = ""  # text before and after a string
    around_object: tuple[str, str] = ("", "")
    around_array: tuple[str, str] = ("", "")
    around_item: tuple[str, str] = ("", "")  # text before and after each item of an array


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFrame:
    """The text that a model writes around the arguments of its tool calls.

    In `before`, `%s` stands for the function's name and `%d` for the call's number in the answer,
    from 0. Example: `before` is "[TOOL_CALLS]%s[ARGS]" for newer Mistral models.
    """

    before: str  # text before a call's arguments
    after: str  # text after a call's arguments
    opens: str = ""  # text before the first call
    between: str = ""  # text between two calls
    closes: str = ""  # text after the last call
    # Text before and text after each parameter's value, such as ("<parameter=%s>", "</parameter>"),
    # where `%s` stands for the parameter's name, and `%t` for "true" if the value is a string
    # without quotes, else for "false". None: the arguments are written as a JSON object.
    pair: tuple[str, str] | None = None
    between_pairs: str = ""
    quotes_values: bool = False  # True: values in pairs are JSON. False: strings have no quotes.
    nested: NestedValues | None = None  # None: objects and arrays in pairs are JSON
    # The frame fits only models that have this string in their chat template or added tokens.
    sign: str = ""
    is_single: bool = False  # True: an answer has at most one call

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Returns calls, given as (name, arguments), in the model's format."""
        written = []
        for number, (name, arguments) in enumerate(calls):
            before = self.before.replace("%d", str(number)).replace("%s", name)
            written.append(f"{before}{self._arguments(arguments)}{self.after}")
        return f"{self.opens}{self.between.join(written)}{self.closes}"

    def _arguments(self, arguments: Mapping[str, Any]) -> str:
        if self.pair is None:
            return json.dumps(arguments, ensure_ascii=False)
        pairs = []
        for key, value in arguments.items():
            is_text = isinstance(value, str) and not self.quotes_values
            opens, closes = self.pair_of(key, is_text=is_text)
            pairs.append(f"{opens}{self.value(value)}{closes}")
        return self.between_pairs.join(pairs)

    def pair_of(self, key: str, *, is_text: bool) -> tuple[str, str]:
        """Returns the text before and after the value of one parameter. `is_text` is True if the
        value is a string without quotes."""
        assert self.pair is not None
        opens, closes = self.pair
        opens = opens.replace("%s", key).replace("%t", "true" if is_text else "false")
        return opens, closes.replace("%s", key)

    def value(self, value: Any) -> str:
        """Returns the value of an argument as the model writes it in a pair."""
        nested = self.nested
        if isinstance(value, str) and not self.quotes_values:
            quote = nested.quote if nested else ""
            return f"{quote}{value}{quote}"
        if nested and isinstance(value, Mapping):
            return self._arguments(value).join(nested.around_object)
        if nested and isinstance(value, list):
            items = (self.value(item).join(nested.around_item) for item in value)
            return self.between_pairs.join(items).join(nested.around_array)
        return json.dumps(value, ensure_ascii=False)


class ReasoningTags(NamedTuple):
    """The strings before and after reasoning, such as "<think>" and "</think>".

    The prompt may already end with `opens`.
    """

    opens: str
    closes: str
    # Strings before and after the content of an answer, such as ("<response>", "</response>").
    around_content: tuple[tuple[str, str], ...] = ()
    prompt_adds: str = ""  # what a prompt may have after `opens`, inside the reasoning

    @property
    def marks(self) -> Sequence[str]:
        """All strings in the tags."""
        return (self.opens, self.closes, *(tag for tags in self.around_content for tag in tags))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """The format in which a family of models writes tool calls, as a state machine (`machine.py`).

    `states` maps names to states. An answer begins in the state named `start`.
    """

    states: Mapping[str, State]
    frames: Sequence[CallFrame] = ()  # the first frame whose `sign` fits the model is used
    start: str = "content"
    make_id: Callable[[str], str] = call_id
    name_of: Callable[[str], str] = _as_written
    known_names_only: bool = False
    trims_lines: bool = False
    # The tags around reasoning if `states` include reasoning, as for gpt-oss. Then the format
    # parses all answers, also answers to chats without tools. None: `states` have no reasoning.
    thought: ReasoningTags | None = None
    opens_answer: str = ""  # markup that the model writes before content; "" for most formats


def _listed(opens: str, closes: str, sign: str = "") -> CallFrame:
    """Returns the frame of a format that writes all calls as one list of JSON objects."""
    return CallFrame(
        opens=opens,
        before='{"name": "%s", "arguments": ',
        after="}",
        between=", ",
        closes=closes,
        sign=sign,
    )


def _tagged(
    wrapper: str,
    call: str,
    key: str,
    *,
    on_lines: bool = False,
    value_ends: str = "</parameter>",
    bare_calls: bool = False,
    shares_wrapper: bool = False,
) -> ToolFormat:
    """Returns a format with tags around each call and each parameter, such as
    <tool_call><function=find><parameter=q>x</parameter></function></tool_call>.

    `wrapper` is the tag around all calls, such as "<tool_call>". `call` and `key` are the opening
    tags of a call and of a parameter, with `%s` for the name and `%t` as in `CallFrame.pair`.
    - `on_lines` is True if a value is written on lines of its own.
    - `bare_calls` is True if calls without a wrapper are parsed, too.
    - `shares_wrapper` is True if the model writes all calls of an answer into one wrapper.
    """
    wrapper_ends = f"</{wrapper[1:]}"
    call_ends = f"</{re.split('[= ]', call[1:])[0]}>"
    (call_opens, name_ends), (key_opens, key_ends) = call.split("%s"), key.split("%s")
    key_states = {key_ends: "value"}
    if "%t" in key_ends:
        key_states = {
            key_ends.replace("%t", "true"): "text",
            key_ends.replace("%t", "false"): "value",
        }
    calls = {wrapper: "call", call_opens: "name"}
    line = "\n" if on_lines else ""
    return ToolFormat(
        states={
            "content": State(Text.CONTENT, calls if bare_calls else {wrapper: "call"}),
            "call": State(Text.INSIDE, {call_opens: "name"}),
            "name": State(Text.NAME, {name_ends: "body"}),
            "body": State(Text.INSIDE, {key_opens: "key", call_ends: "between"}),
            "key": State(Text.KEY, key_states),
            "value": State(Text.VALUE, {value_ends: "body"}),
            "text": State(Text.TEXT_VALUE, {value_ends: "body"}),
            "between": State(Text.BETWEEN, {wrapper_ends: "between", **calls}),
        },
        frames=[
            CallFrame(
                opens=f"{wrapper}\n",
                before=f"{call}\n",
                pair=(key + line, f"{line}{value_ends}\n"),
                after=f"{call_ends}\n",
                between="" if shares_wrapper else f"{wrapper_ends}\n{wrapper}\n",
                closes=wrapper_ends,
            )
        ],
        trims_lines=on_lines,
    )


_QWEN3_CODER = _tagged(
    "<tool_call>", "<function=%s>", "<parameter=%s>", on_lines=True, bare_calls=True
)
_SEED_OSS = _tagged("<seed:tool_call>", "<function=%s>", "<parameter=%s>")
_MINIMAX_M2 = _tagged(
    "<minimax:tool_call>", '<invoke name="%s">', '<parameter name="%s">', shares_wrapper=True
)


def _python_calls(opens: str, between: str, closes: str, sign: str = "") -> CallFrame:
    """Returns the frame of calls in Python's notation, such as find(q="x", deep=true)."""
    return CallFrame(
        opens=opens,
        before="%s(",
        pair=("%s=", ""),
        between_pairs=", ",
        quotes_values=True,
        after=")",
        between=between,
        closes=closes,
        sign=sign,
    )


def _enclosed(
    opens: str, closes: str, frame: CallFrame, notation: Notation | None = None
) -> ToolFormat:
    """Returns a format that writes calls between two strings, as JSON or in `notation`."""
    return ToolFormat(
        states={
            "content": State(Text.CONTENT, {opens: "calls"}),
            "calls": State(Text.CALLS, {closes: "between"}, notation=notation),
            "between": State(Text.BETWEEN, {opens: "calls"}),
        },
        frames=[frame],
    )


_HERMES = _enclosed(
    "<tool_call>",
    "</tool_call>",
    CallFrame(
        before='<tool_call>\n{"name": "%s", "arguments": ',
        after="}\n</tool_call>",
        between="\n",
    ),
)
_LFM2 = _enclosed(
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    _python_calls("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    PYTHON,
)
_OLMO3 = _enclosed(
    "<function_calls>",
    "</function_calls>",
    _python_calls("<function_calls>\n", "\n", "\n</function_calls>"),
    PYTHON,
)


# MiniMax M3 has a string of its own before each tag, and writes objects and arrays as tags, such as
# <tags><item>a</item><item>b</item></tags>.
_NAMESPACE = "]<]minimax[>["
_MINIMAX_M3 = ToolFormat(
    states={
        "content": State(Text.CONTENT, {f"{_NAMESPACE}<tool_call>": "call"}),
        "call": State(Text.INSIDE, {f'{_NAMESPACE}<invoke name="': "name"}),
        "name": State(Text.NAME, {'">': "body"}),
        "body": State(Text.INSIDE, {f"{_NAMESPACE}<": "key", f"{_NAMESPACE}</invoke>": "between"}),
        "key": State(Text.KEY, {">": "value"}),
        "value": State(Text.VALUE, {f"{_NAMESPACE}<": "key", f"{_NAMESPACE}</": "value end"}),
        "value end": State(Text.VALUE_END, {">": "value"}, otherwise="body"),
        "between": State(
            Text.BETWEEN,
            {
                f'{_NAMESPACE}<invoke name="': "name",
                f"{_NAMESPACE}</tool_call>": "between",
                f"{_NAMESPACE}<tool_call>": "call",
            },
        ),
    },
    frames=[
        CallFrame(
            opens=f"{_NAMESPACE}<tool_call>\n",
            before=f'{_NAMESPACE}<invoke name="%s">',
            pair=(f"{_NAMESPACE}<%s>", f"{_NAMESPACE}</%s>"),
            nested=NestedValues(around_item=(f"{_NAMESPACE}<item>", f"{_NAMESPACE}</item>")),
            after=f"{_NAMESPACE}</invoke>\n",
            closes=f"{_NAMESPACE}</tool_call>",
        )
    ],
)


def _deepseek(wrapper: str) -> ToolFormat:
    """Returns the format of the models from DeepSeek V3.2 on."""
    return _tagged(
        f"<｜DSML｜{wrapper}>",
        '<｜DSML｜invoke name="%s">',
        '<｜DSML｜parameter name="%s" string="%t">',
        value_ends="</｜DSML｜parameter>",
        shares_wrapper=True,
    )


_DEEPSEEK_V3_2 = _deepseek("function_calls")
_DEEPSEEK_V4 = _deepseek("tool_calls")


# Llama 3 writes calls as JSON, with or without the tag before them, and semicolons between calls.
_LLAMA3 = ToolFormat(
    states={
        "start": State(Text.CALLS, {"<|python_tag|>": "call"}),
        "call": State(Text.CALLS, {"<|python_tag|>": "call"}),
        "content": State(Text.CONTENT, {"<|python_tag|>": "call"}),
    },
    frames=[CallFrame(before='{"name": "%s", "parameters": ', after="}", between="; ")],
    start="start",
    known_names_only=True,
)

# Llama 4 writes calls as JSON, or as a list in Python's notation, with or without tags around them.
_LLAMA4 = ToolFormat(
    states={
        "start": State(Text.CALLS, {"<|python_start|>": "call"}, notation=PYTHON),
        "call": State(Text.CALLS, {"<|python_end|>": "between"}, notation=PYTHON),
        "between": State(Text.BETWEEN, {"<|python_start|>": "call"}),
        "content": State(Text.CONTENT, {"<|python_start|>": "call"}),
    },
    frames=[_python_calls("[", ", ", "]", sign="func_name1("), *_LLAMA3.frames],
    start="start",
    known_names_only=True,
)

_GEMMA4 = _enclosed(
    "<|tool_call>",
    "<tool_call|>",
    CallFrame(
        before="<|tool_call>call:%s{",
        pair=("%s:", ""),
        between_pairs=",",
        nested=NestedValues('<|"|>', ("{", "}"), ("[", "]")),
        after="}<tool_call|>",
    ),
    GEMMA,
)

# Older models:  [TOOL_CALLS][{"name": "find", "arguments": {...}}, ...]
# Newer models:  [TOOL_CALLS]find[ARGS]{...}[TOOL_CALLS]find[ARGS]{...}
_MISTRAL = ToolFormat(
    states={
        "content": State(Text.CONTENT, {"[TOOL_CALLS]": "call"}),
        "call": State(Text.CALLS, otherwise="name"),
        "name": State(Text.NAME, {"[ARGS]": "arguments", "[CALL_ID]": "id"}),
        "id": State(Text.SKIPPED, {"[ARGS]": "arguments"}),
        "arguments": State(Text.ARGUMENTS, {"[TOOL_CALLS]": "call"}),
    },
    frames=[
        CallFrame(before="[TOOL_CALLS]%s[ARGS]", after="", sign="[ARGS]"),
        _listed("[TOOL_CALLS][", "]"),
    ],
    make_id=mistral_call_id,
)

_DEEPSEEK_SECTION = {
    "content": State(Text.CONTENT, {"<｜tool▁calls▁begin｜>": "calls"}),
    "calls": State(
        Text.BETWEEN, {"<｜tool▁call▁begin｜>": "call", "<｜tool▁calls▁end｜>": "content"}
    ),
}
_DEEPSEEK_V3 = ToolFormat(
    states={
        **_DEEPSEEK_SECTION,
        "call": State(Text.SKIPPED, {"<｜tool▁sep｜>": "name"}),
        "name": State(Text.NAME, {"\n```json\n": "arguments"}),
        "arguments": State(Text.ARGUMENTS, {"\n```": "fence", "<｜tool▁call▁end｜>": "calls"}),
        "fence": State(Text.INSIDE, {"<｜tool▁call▁end｜>": "calls"}),
    },
    frames=[
        CallFrame(
            opens="<｜tool▁calls▁begin｜>",
            before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n",
            after="\n```<｜tool▁call▁end｜>",
            between="\n",
            closes="<｜tool▁calls▁end｜>",
        )
    ],
)
_DEEPSEEK_V3_1 = ToolFormat(
    states={
        **_DEEPSEEK_SECTION,
        "call": State(Text.NAME, {"<｜tool▁sep｜>": "arguments"}),
        "arguments": State(Text.ARGUMENTS, {"<｜tool▁call▁end｜>": "calls"}),
    },
    frames=[
        CallFrame(
            opens="<｜tool▁calls▁begin｜>",
            before="<｜tool▁call▁begin｜>%s<｜tool▁sep｜>",
            after="<｜tool▁call▁end｜>",
            closes="<｜tool▁calls▁end｜>",
        )
    ],
)

_GLM45 = ToolFormat(
    states={
        "content": State(Text.CONTENT, {"<tool_call>": "name"}),
        "name": State(Text.NAME, {"<arg_key>": "key", "</tool_call>": "between"}),
        "key": State(Text.KEY, {"</arg_key>": "equals"}),
        "equals": State(Text.INSIDE, {"<arg_value>": "value"}),
        "value": State(Text.VALUE, {"</arg_value>": "body"}),
        "body": State(Text.INSIDE, {"<arg_key>": "key", "</tool_call>": "between"}),
        "between": State(Text.BETWEEN, {"<tool_call>": "name"}),
    },
    frames=[
        CallFrame(  # from GLM 4.7 on
            before="<tool_call>%s",
            pair=("<arg_key>%s</arg_key><arg_value>", "</arg_value>"),
            after="</tool_call>",
            sign="</arg_key><arg_value>",
        ),
        CallFrame(
            before="<tool_call>%s\n",
            pair=("<arg_key>%s</arg_key>\n<arg_value>", "</arg_value>\n"),
            after="</tool_call>",
            between="\n",
        ),
    ],
)

_SUFFIX = ":opensource"  # Hy3 has it in its tags, such as <tool_call:opensource>


def _with_suffix(tag: str) -> str:
    return f"{tag.removesuffix('>')}{_SUFFIX}>"


def _hy3_frame(sign: str, adapt: Callable[[str], str]) -> CallFrame:
    """Returns Hy3's frame. `adapt` changes each tag."""
    return CallFrame(
        opens=adapt("<tool_calls>") + "\n",
        before=f"{adapt('<tool_call>')}%s{adapt('<tool_sep>')}\n",
        pair=(
            f"{adapt('<arg_key>')}%s{adapt('</arg_key>')}\n{adapt('<arg_value>')}",
            adapt("</arg_value>") + "\n",
        ),
        after=adapt("</tool_call>") + "\n",
        closes=adapt("</tool_calls>"),
        sign=sign,
    )


# Hunyuan:  <tool_calls>[{"name": "find", "arguments": {...}}, ...]</tool_calls>
# Hy3:      <tool_calls><tool_call>find<tool_sep><arg_key>q</arg_key><arg_value>x</arg_value>
#           </tool_call></tool_calls>, also with the suffix in each tag
_HUNYUAN = ToolFormat(
    states={
        name: State(text, terminals | {_with_suffix(t): n for t, n in terminals.items()})
        for name, (text, terminals) in {
            "content": (Text.CONTENT, {"<tool_calls>": "calls"}),
            "calls": (Text.CALLS, {"<tool_call>": "name", "</tool_calls>": "content"}),
            "name": (
                Text.NAME,
                {"<tool_sep>": "body", "<arg_key>": "key", "</tool_call>": "between"},
            ),
            "body": (Text.INSIDE, {"<arg_key>": "key", "</tool_call>": "between"}),
            "key": (Text.KEY, {"</arg_key>": "equals"}),
            "equals": (Text.INSIDE, {"<arg_value>": "value"}),
            "value": (Text.VALUE, {"</arg_value>": "body"}),
            "between": (
                Text.BETWEEN,
                {"<tool_call>": "name", "<tool_calls>": "calls", "</tool_calls>": "content"},
            ),
        }.items()
    },
    frames=[
        _hy3_frame(_with_suffix("<arg_key>"), _with_suffix),
        _hy3_frame("<arg_key>", _as_written),
        _listed("<tool_calls>[", "]</tool_calls>"),
    ],
)

_KIMI_K2 = ToolFormat(
    states={
        "content": State(Text.CONTENT, {"<|tool_calls_section_begin|>": "calls"}),
        "calls": State(
            Text.BETWEEN,
            {"<|tool_call_begin|>": "name", "<|tool_calls_section_end|>": "content"},
        ),
        "name": State(Text.NAME, {"<|tool_call_argument_begin|>": "arguments"}),
        "arguments": State(Text.ARGUMENTS, {"<|tool_call_end|>": "calls"}),
    },
    frames=[
        CallFrame(
            opens="<|tool_calls_section_begin|>",
            before="<|tool_call_begin|>functions.%s:%d<|tool_call_argument_begin|>",
            after="<|tool_call_end|>",
            closes="<|tool_calls_section_end|>",
        )
    ],
    make_id=kimi_call_id,
    name_of=_kimi_name,
)

_PHI4_MINI = ToolFormat(
    states={
        "content": State(Text.CONTENT, {"<|tool_call|>": "calls", "functools": "calls"}),
        "calls": State(Text.CALLS, {"<|/tool_call|>": "content"}),
    },
    frames=[_listed("<|tool_call|>[", "]<|/tool_call|>")],
)

_GRANITE = ToolFormat(
    states={
        "content": State(Text.CONTENT, {"<|tool_call|>": "calls", "<tool_call>": "calls"}),
        "calls": State(Text.CALLS, {"</tool_call>": "between"}),
        "between": State(Text.BETWEEN, {"<|tool_call|>": "calls", "<tool_call>": "calls"}),
    },
    frames=[_listed("<|tool_call|>[", "]", sign="<|tool_call|>"), _listed("<tool_call>[", "]")],
)

# Command R7B, Command A:  <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "find",
#                            "parameters": {...}}, ...]<|END_ACTION|>
_COHERE = _enclosed(
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    CallFrame(
        opens="<|START_ACTION|>[",
        before='{"tool_call_id": "%d", "tool_name": "%s", "parameters": ',
        after="}",
        between=", ",
        closes="]<|END_ACTION|>",
    ),
)

_NEMOTRON = _enclosed("<TOOLCALL>", "</TOOLCALL>", _listed("<TOOLCALL>[", "]</TOOLCALL>"))

# The format for models without a format of their own. The whole answer is a call as a JSON object,
# or a list of such calls.
_JSON = ToolFormat(
    states={"start": State(Text.CALLS), "content": State(Text.CONTENT)},
    frames=[_listed("[", "]")],
    start="start",
    known_names_only=True,
)

# OpenAI's gpt-oss. An answer is a sequence of messages. Each message begins with a header, which
# names the channel and, for a tool call, the function. Example of a call:
# <|channel|>commentary to=functions.find <|constrain|>json<|message|>{...}<|call|>
_NEXT_MESSAGE = {
    **dict.fromkeys(("<|end|>", "<|call|>"), "start"),
    "<|start|>": "role",
    "<|channel|>": "channel",
}
_HARMONY = ToolFormat(
    states={
        "start": State(Text.HEAD, {**_NEXT_MESSAGE, "to=": "name", "<|message|>": "content"}),
        "role": State(
            Text.LABEL,
            {
                "assistant": "start",
                "to=": "name",
                "<|channel|>": "channel",
                "<|message|>": "content",
            },
        ),
        "channel": State(
            Text.LABEL,
            {
                "analysis": "thought",
                **dict.fromkeys(("final", "commentary"), "head"),
                "to=": "name",
                "<|message|>": "content",
            },
        ),
        "thought": State(
            Text.LABEL,
            {"to=": "name", "<|constrain|>": "thought", "<|message|>": "reasoning"},
            otherwise="reasoning",
        ),
        "head": State(
            Text.LABEL, {"to=": "name", "<|constrain|>": "head", "<|message|>": "content"}
        ),
        "reasoning": State(Text.REASONING, _NEXT_MESSAGE),
        "content": State(Text.CONTENT, _NEXT_MESSAGE),
        "name": State(
            Text.NAME,
            {
                **dict.fromkeys((" ", "<|channel|>", "<|constrain|>"), "call"),
                "<|message|>": "arguments",
            },
        ),
        "call": State(
            Text.LABEL,
            {
                **dict.fromkeys((" ", "<|channel|>", "<|constrain|>"), "call"),
                "<|message|>": "arguments",
            },
        ),
        "arguments": State(Text.ARGUMENTS, _NEXT_MESSAGE),
    },
    frames=[
        CallFrame(
            before="<|channel|>commentary to=functions.%s <|constrain|>json<|message|>",
            after="",
            is_single=True,
        )
    ],
    start="start",
    name_of=_harmony_name,
    known_names_only=True,
    thought=ReasoningTags("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    opens_answer="<|channel|>final<|message|>",
)

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": _HERMES,
    "qwen3_coder": _QWEN3_CODER,
    "llama3": _LLAMA3,
    "llama4": _LLAMA4,
    "lfm2": _LFM2,
    "olmo3": _OLMO3,
    "gemma4": _GEMMA4,
    "mistral": _MISTRAL,
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v31": _DEEPSEEK_V3_1,
    "deepseek_v32": _DEEPSEEK_V3_2,
    "deepseek_v4": _DEEPSEEK_V4,
    "seed_oss": _SEED_OSS,
    "minimax_m2": _MINIMAX_M2,
    "minimax_m3": _MINIMAX_M3,
    "glm45": _GLM45,
    "hunyuan": _HUNYUAN,
    "kimi_k2": _KIMI_K2,
    "phi4_mini": _PHI4_MINI,
    "granite": _GRANITE,
    "nemotron": _NEMOTRON,
    "cohere": _COHERE,
    "harmony": _HARMONY,
    "json": _JSON,
}


def read_json_too(tool_format: ToolFormat) -> ToolFormat:
    """Returns `tool_format` extended so that it also parses calls in the format `json`.

    If the chat template of a model does not support tools, the prompt requests calls in the format
    `json`. The model may still write its calls in `tool_format`.
    """
    states = dict(tool_format.states)
    start = tool_format.start
    if tool_format.thought is not None:  # content, or a call as JSON, follows a message's header
        for name, state in tool_format.states.items():
            if state.text in (Text.HEAD, Text.LABEL):
                to = {t: "json" if n == "content" else n for t, n in state.terminals.items()}
                states[name] = replace(state, terminals=to)
        states["json"] = State(Text.CALLS, states["content"].terminals)
        return replace(tool_format, states=states)
    if states[start].text is not Text.CALLS:
        states["json"] = State(Text.CALLS, states[start].terminals, otherwise=start)
        start = "json"
    return replace(tool_format, states=states, start=start, known_names_only=True)


_COHERE_CONTENT = (
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("<|START_TEXT|>", "<|END_TEXT|>"),
)
_HY3_THOUGHT = ReasoningTags(_with_suffix("<think>"), _with_suffix("</think>"))
REASONING_TAGS: Mapping[str, ReasoningTags | None] = {
    "think": ReasoningTags("<think>", "</think>"),
    "mistral": ReasoningTags("[THINK]", "[/THINK]"),
    "gemma4": ReasoningTags("<|channel>thought\n", "<channel|>"),
    "minimax_m3": ReasoningTags("<mm:think>", "</mm:think>"),
    "seed_oss": ReasoningTags(
        # Its template opens the reasoning only if `thinking_budget` is 0.
        "<seed:think>",
        "</seed:think>",
        prompt_adds="<seed:cot_budget_reflect>",
    ),
    "hunyuan": ReasoningTags("<think>", "</think>", (("<answer>", "</answer>"),)),
    "hy3": _HY3_THOUGHT,
    "ernie45": ReasoningTags("<think>", "</think>", (("<response>", "</response>"),)),
    "cohere": ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>", _COHERE_CONTENT),
    "granite": ReasoningTags("Here is my thought process:", "Here is my response:"),
    "none": None,
}

# (name of a format, strings). The first format whose strings all occur in the chat template is
# chosen; if there is none, the first one whose strings all are added tokens.
_SIGNS_OF_TOOLS = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("deepseek_v32", ("｜DSML｜", "function_calls>")),
    ("deepseek_v4", ("｜DSML｜",)),
    ("minimax_m3", (_NAMESPACE,)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("hunyuan", (_with_suffix("<tool_calls>"),)),
    ("hunyuan", ("<tool_calls>",)),
    ("nemotron", ("<TOOLCALL>",)),
    ("cohere", ("<|START_ACTION|>",)),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("olmo3", ("<function_calls>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("glm45", ("<arg_key>",)),
    ("kimi_k2", ("<|tool_call_argument_begin|>",)),
    ("deepseek_v3", ("<｜tool▁sep｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁sep｜>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("mistral", ("[AVAILABLE_TOOLS]",)),
    ("hermes", ("<tool_call>",)),
    ("granite", ("<|start_of_role|>",)),
    ("phi4_mini", ("<|tool_call|>",)),
    ("phi4_mini", ("<|tool|>",)),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ("<|start_header_id|>",)),
    ("llama4", ("<|header_start|>",)),
)
_SIGNS_OF_REASONING = (
    ("granite", ("Here is my thought process:",)),
    ("mistral", ("[THINK]",)),
    ("gemma4", ("<|channel>thought",)),
    ("minimax_m3", ("<mm:think>",)),
    ("seed_oss", ("<seed:think>",)),
    ("cohere", ("<|START_THINKING|>",)),
    ("cohere", ("<|START_RESPONSE|>",)),
    ("think", ("<minimax:tool_call>", "<think>")),  # Its template has <response>, too.
    ("hunyuan", ("<answer>", "</think>")),
    ("ernie45", ("<response>", "</think>")),
    ("think", ("</think>",)),
    ("think", ("<think>",)),
)


def choose_tool_format(template: str, added_tokens: Collection[str]) -> str:
    """Returns the name of the format that fits a model's chat template or else its added tokens;
    `json` if none does."""
    for text in (template, added_tokens):
        for name, signs in _SIGNS_OF_TOOLS:
            if all(sign in text for sign in signs):
                return name
    return "json"


def choose_reasoning(template: str, added_tokens: Collection[str]) -> str:
    """Returns the name of the reasoning tags that fit a model's chat template or added tokens;
    `none` if none do."""
    if _HY3_THOUGHT.opens in added_tokens:  # The template composes it of parts.
        return "hy3"
    fits = (n for n, signs in _SIGNS_OF_REASONING if all(sign in template for sign in signs))
    return next(fits, "none")

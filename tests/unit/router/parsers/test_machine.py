"""Golden texts of each format, and the same parts however the text is cut."""

# DeepSeek's tokens have full-width bars.
# ruff: noqa: RUF001

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.router.parsers.formats import REASONING_TAGS, TOOL_FORMATS
from tandem.router.parsers.machine import AnswerParser, Parts
from tandem.router.parsers.model_format import make_answer_parser

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "metric": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
}
SCHEMAS = {"get_weather": WEATHER, "now": {"type": "object", "properties": {}}}
PARIS = ("get_weather", {"city": "Paris", "days": 2})
ROME = ("get_weather", {"city": 'R"ome\n</tool_call>', "days": 3})
NOW = ("now", {})


class Said(NamedTuple):
    """Everything that a client is told, with arguments as text."""

    reasoning: str
    content: str
    calls: list[tuple[str, str]]


def make(
    tools: str, reasoning: str = "none", *, opened: bool = False, one: bool = False
) -> AnswerParser:
    return make_answer_parser(
        TOOL_FORMATS[tools] if tools else None,
        REASONING_TAGS[reasoning],
        schemas=SCHEMAS,
        one_call_only=one,
        begins_in_reasoning=opened,
    )


def join(parts: list[Parts]) -> Said:
    calls: dict[int, list[str]] = {}
    for part in parts:
        for delta in part.calls:
            if delta.index not in calls:
                assert delta.name, "the name comes with the first delta"
                assert delta.id, "the id comes with the first delta"
                assert delta.index == len(calls)
                calls[delta.index] = [delta.name, ""]
            else:
                assert not delta.name, "the name comes once"
            calls[delta.index][1] += delta.arguments
    return Said(
        "".join(p.reasoning for p in parts),
        "".join(p.content for p in parts),
        [(name, arguments) for name, arguments in calls.values()],
    )


def whole(machine: AnswerParser, text: str) -> Said:
    return join([machine.push(text), machine.finish()])


def cut(machine: AnswerParser, text: str, places: list[int]) -> Said:
    ends = sorted({min(p, len(text)) for p in places} | {len(text)})
    pieces = [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    return join([*(machine.push(p) for p in pieces), machine.finish()])


def values(said: Said) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in said.calls]


def as_json(call: tuple[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def hermes(*calls: tuple[str, Any]) -> str:
    return "\n".join(f"<tool_call>\n{as_json(c)}\n</tool_call>" for c in calls)


def falcon_h1(*calls: tuple[str, Any]) -> str:
    return f"<tool_call>\n{bare_list(*calls)}\n</tool_call>"


def qwen3_coder(*calls: tuple[str, Any]) -> str:
    def parameter(key: str, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value)
        return f"<parameter={key}>\n{text}\n</parameter>\n"

    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(parameter(k, v) for k, v in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def llama3(*calls: tuple[str, Any]) -> str:
    return "; ".join(as_json(c, "parameters") for c in calls)


def python_tag(*calls: tuple[str, Any]) -> str:
    return "<|python_tag|>" + llama3(*calls)


def python_calls(*calls: tuple[str, Any]) -> list[str]:
    def argument(key: str, value: Any) -> str:
        return f"{key}={value!r}"

    return [f"{name}({', '.join(argument(k, v) for k, v in a.items())})" for name, a in calls]


def llama4(*calls: tuple[str, Any]) -> str:
    return f"[{', '.join(python_calls(*calls))}]"


def python_start(*calls: tuple[str, Any]) -> str:
    return f"<|python_start|>{llama4(*calls)}<|python_end|>"


def python_start_json(*calls: tuple[str, Any]) -> str:
    return f"<|python_start|>{llama3(*calls)}<|python_end|>"


def lfm2(*calls: tuple[str, Any]) -> str:
    return f"<|tool_call_start|>{llama4(*calls)}<|tool_call_end|>"


def lfm2_json(*calls: tuple[str, Any]) -> str:
    return f"<|tool_call_start|>{bare_list(*calls)}<|tool_call_end|>"


def olmo3(*calls: tuple[str, Any]) -> str:
    lines = "\n".join(python_calls(*calls))
    return f"<function_calls>\n{lines}\n</function_calls>"


def gemma4(*calls: tuple[str, Any]) -> str:
    def pair(key: str, value: Any) -> str:
        return f"{key}:" + (f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value))

    return "".join(
        f"<|tool_call>call:{name}{{{','.join(pair(k, v) for k, v in arguments.items())}}}"
        "<tool_call|>"
        for name, arguments in calls
    )


def mistral_list(*calls: tuple[str, Any]) -> str:
    return f"[TOOL_CALLS] [{', '.join(map(as_json, calls))}]"


def mistral_names(*calls: tuple[str, Any]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(a)}" for name, a in calls)


def mistral_ids(*calls: tuple[str, Any]) -> str:
    return "".join(f"[TOOL_CALLS]{n}[CALL_ID]a1b2c3d4e[ARGS]{json.dumps(a)}" for n, a in calls)


def deepseek_v3(*calls: tuple[str, Any]) -> str:
    return (
        "<｜tool▁calls▁begin｜>"
        + "\n".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}"
            "\n```<｜tool▁call▁end｜>"
            for name, arguments in calls
        )
        + "<｜tool▁calls▁end｜>"
    )


def deepseek_v31(*calls: tuple[str, Any]) -> str:
    return (
        "<｜tool▁calls▁begin｜>"
        + "".join(
            f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
            for name, arguments in calls
        )
        + "<｜tool▁calls▁end｜>"
    )


def deepseek_v32(*calls: tuple[str, Any]) -> str:
    def parameter(key: str, value: Any) -> str:
        is_text = isinstance(value, str)
        text = value if is_text else json.dumps(value)
        head = f'<｜DSML｜parameter name="{key}" string="{str(is_text).lower()}">'
        return f"{head}{text}</｜DSML｜parameter>\n"

    return (
        "<｜DSML｜function_calls>\n"
        + "".join(
            f'<｜DSML｜invoke name="{name}">\n'
            f"{''.join(parameter(k, v) for k, v in arguments.items())}</｜DSML｜invoke>\n"
            for name, arguments in calls
        )
        + "</｜DSML｜function_calls>"
    )


def deepseek_v4(*calls: tuple[str, Any]) -> str:
    return deepseek_v32(*calls).replace("function_calls>", "tool_calls>")


def glm45(*calls: tuple[str, Any]) -> str:
    def pair(key: str, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value)
        return f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n"

    return "\n".join(
        f"<tool_call>{name}\n{''.join(pair(k, v) for k, v in arguments.items())}</tool_call>"
        for name, arguments in calls
    )


def glm47(*calls: tuple[str, Any]) -> str:
    return glm45(*calls).replace("\n<", "<").replace("\n<", "<")


def seed_oss(*calls: tuple[str, Any]) -> str:
    text = qwen3_coder(*calls).replace(">\n", ">").replace("\n</", "</")
    return text.replace("tool_call>", "seed:tool_call>")


def minimax_m2(*calls: tuple[str, Any]) -> str:
    def parameter(key: str, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value)
        return f'<parameter name="{key}">{text}</parameter>\n'

    return (
        "<minimax:tool_call>\n"
        + "".join(
            f'<invoke name="{name}">\n{"".join(parameter(k, v) for k, v in arguments.items())}'
            "</invoke>\n"
            for name, arguments in calls
        )
        + "</minimax:tool_call>"
    )


def minimax_m3(*calls: tuple[str, Any]) -> str:
    mark = "]<]minimax[>["

    def tagged(name: str, value: Any) -> str:
        if isinstance(value, dict):
            text = "".join(tagged(k, v) for k, v in value.items())
        elif isinstance(value, list):
            text = "".join(tagged("item", item) for item in value)
        else:
            text = value if isinstance(value, str) else json.dumps(value)
        return f"{mark}<{name}>{text}{mark}</{name}>"

    invokes = (
        f'{mark}<invoke name="{name}">{"".join(tagged(k, v) for k, v in arguments.items())}'
        f"{mark}</invoke>\n"
        for name, arguments in calls
    )
    return f"{mark}<tool_call>\n{''.join(invokes)}{mark}</tool_call>"


def hunyuan(*calls: tuple[str, Any]) -> str:
    return f"<tool_calls>{bare_list(*calls)}</tool_calls>"


def hy3(*calls: tuple[str, Any]) -> str:
    written = glm45(*calls)
    for name, _ in calls:
        written = written.replace(f"<tool_call>{name}\n", f"<tool_call>{name}<tool_sep>\n")
    return f"<tool_calls>\n{written}\n</tool_calls>"


def hy3_with_suffix(*calls: tuple[str, Any]) -> str:
    return re.sub(r"(tool_calls?|tool_sep|arg_key|arg_value)>", r"\1:opensource>", hy3(*calls))


def nemotron(*calls: tuple[str, Any]) -> str:
    return f"<TOOLCALL>{bare_list(*calls)}</TOOLCALL>"


def cohere(*calls: tuple[str, Any]) -> str:
    written = [
        {"tool_call_id": str(index), "tool_name": name, "parameters": arguments}
        for index, (name, arguments) in enumerate(calls)
    ]
    return f"<|START_ACTION|>{json.dumps(written, indent=4)}<|END_ACTION|>"


def kimi_k2(*calls: tuple[str, Any]) -> str:
    return (
        "<|tool_calls_section_begin|>"
        + "".join(
            f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
            f"{json.dumps(arguments)}<|tool_call_end|>"
            for index, (name, arguments) in enumerate(calls)
        )
        + "<|tool_calls_section_end|>"
    )


def phi4_mini(*calls: tuple[str, Any]) -> str:
    return f"<|tool_call|>[{', '.join(map(as_json, calls))}]<|/tool_call|>"


def functools(*calls: tuple[str, Any]) -> str:
    return f"functools[{', '.join(map(as_json, calls))}]"


def granite(*calls: tuple[str, Any]) -> str:
    return f"<|tool_call|>[{', '.join(map(as_json, calls))}]"


def harmony(*calls: tuple[str, Any]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{json.dumps(arguments)}<|call|>"
        for name, arguments in calls
    )


def bare_list(*calls: tuple[str, Any]) -> str:
    return json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])


# writer: parser, whether content may stand before the calls
WRITERS = {
    hermes: ("hermes", True),
    falcon_h1: ("hermes", True),
    qwen3_coder: ("qwen3_coder", True),
    llama3: ("llama3", False),
    python_tag: ("llama3", True),
    llama4: ("llama4", False),
    python_start: ("llama4", True),
    python_start_json: ("llama4", True),
    lfm2: ("lfm2", True),
    lfm2_json: ("lfm2", True),
    olmo3: ("olmo3", True),
    gemma4: ("gemma4", True),
    mistral_list: ("mistral", True),
    mistral_names: ("mistral", True),
    mistral_ids: ("mistral", True),
    deepseek_v3: ("deepseek_v3", True),
    deepseek_v31: ("deepseek_v31", True),
    deepseek_v32: ("deepseek_v32", True),
    deepseek_v4: ("deepseek_v4", True),
    glm45: ("glm45", True),
    glm47: ("glm45", True),
    seed_oss: ("seed_oss", True),
    minimax_m2: ("minimax_m2", True),
    minimax_m3: ("minimax_m3", True),
    hunyuan: ("hunyuan", True),
    hy3: ("hunyuan", True),
    hy3_with_suffix: ("hunyuan", True),
    nemotron: ("nemotron", True),
    cohere: ("cohere", True),
    kimi_k2: ("kimi_k2", True),
    phi4_mini: ("phi4_mini", True),
    functools: ("phi4_mini", True),
    granite: ("granite", True),
    harmony: ("harmony", False),  # all of it stands in messages
    bare_list: ("json", False),
}
NAMES = {writer.__name__: writer for writer in WRITERS}
TAGS_INSIDE = {qwen3_coder, glm45, glm47, hy3, hy3_with_suffix, seed_oss, minimax_m2}


def test_every_format_has_a_golden_text() -> None:
    assert {parser for parser, _ in WRITERS.values()} == set(TOOL_FORMATS)


@pytest.mark.parametrize("name", NAMES)
def test_calls_come_out_whole_and_at_every_cut(name: str) -> None:
    writer = NAMES[name]
    parser, has_content = WRITERS[writer]
    tricky = PARIS if writer in TAGS_INSIDE else ROME
    for calls in ([PARIS], [PARIS, tricky], [NOW], [NOW, PARIS, NOW]):
        before = "Let me look.\n\n" if has_content else ""
        text = before + writer(*calls)
        said = whole(make(parser), text)
        assert values(said) == calls, text
        assert said.content == before.strip()
        for place in range(len(text)):
            assert cut(make(parser), text, [place]) == said, (text[:place], text[place:])
        assert cut(make(parser), text, list(range(len(text)))) == said


@pytest.mark.parametrize("name", NAMES)
def test_one_call_only_ends_with_the_first(name: str) -> None:
    parser, _ = WRITERS[NAMES[name]]
    machine = make(parser, one=True)
    said = whole(machine, NAMES[name](PARIS, NOW))
    assert (values(said), said.content, machine.is_done) == ([PARIS], "", True)


WORDS = (
    "a", "Hi ", "\n", "{", "}", "[", "]", '"', "\\", ":", ",", ";", ">", "<", "\n```", "```json\n",
    '{"name": "get_weather", "arguments": {"city": "x"', '{"name": "now"}', '"parameters": ', "now",
    "get_weather", "function", "<think>", "</think>", "[THINK]", "[/THINK]",
)  # fmt: skip


def terminals(parser: str) -> list[str]:
    return sorted({t for s in TOOL_FORMATS[parser].states.values() for t in s.terminals})


@pytest.mark.parametrize("parser", TOOL_FORMATS)
@settings(max_examples=30)
@given(data=st.data())
def test_no_text_is_lost_or_depends_on_where_it_is_cut(parser: str, data: st.DataObject) -> None:
    reasoning = data.draw(st.sampled_from(sorted(REASONING_TAGS)))
    opened = reasoning != "none" and data.draw(st.booleans())
    one = data.draw(st.booleans())
    good = [w(*calls) for w, (p, _) in WRITERS.items() if p == parser for calls in ([NOW], [PARIS])]
    pieces = st.one_of(st.sampled_from([*terminals(parser), *WORDS]), st.sampled_from(good))
    text = "".join(data.draw(st.lists(pieces, max_size=12)))
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    said = whole(make(parser, reasoning, opened=opened, one=one), text)
    assert cut(make(parser, reasoning, opened=opened, one=one), text, places) == said
    characters = list(range(len(text)))
    assert cut(make(parser, reasoning, opened=opened, one=one), text, characters) == said
    if parser == "harmony":  # its heads are nobody's
        return
    if not one and not said.calls and not said.reasoning and reasoning == "none":
        assert "".join(said.content.split()) == "".join(text.split())


@pytest.mark.parametrize("parser", TOOL_FORMATS)
@settings(max_examples=60)
@given(data=st.data())
def test_all_text_arrives_somewhere(parser: str, data: st.DataObject) -> None:
    """Two words are never a part of a format, whatever stands around them."""
    reasoning = data.draw(st.sampled_from(sorted(REASONING_TAGS)))
    opened = reasoning != "none" and data.draw(st.booleans())
    good = [w(*calls) for w, (p, _) in WRITERS.items() if p == parser for calls in ([NOW], [PARIS])]
    begun = [text[: len(text) // 2] for text in good]
    tags = [tag for tags in REASONING_TAGS.values() if tags for tag in tags.marks]
    marks = st.sampled_from([*terminals(parser), *tags, *good, *begun, "\n", "{", "["])
    pieces = data.draw(st.lists(st.one_of(marks, st.none()), max_size=12))
    words = [f"w{i} v{i}" if piece is None else "" for i, piece in enumerate(pieces)]
    text = "".join(word or piece or "" for word, piece in zip(words, pieces, strict=True))
    said = whole(make(parser, reasoning, opened=opened), text)
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert cut(make(parser, reasoning, opened=opened), text, places) == said
    arrived = [said.reasoning, said.content, *(part for call in said.calls for part in call)]
    if parser == "harmony":  # all words after a recipient belong to the head of its message
        text = re.sub(r"to=.*?<\|message\|>", "", text, flags=re.DOTALL)
    for word in filter(None, words):
        assert word not in text or any(word in part for part in arrived), (word, text, said)


NESTED = {
    "type": "object",
    "properties": {
        "ship": {"$ref": "#/$defs/Address"},
        "items": {"type": "array", "items": {"$ref": "#/$defs/Item"}},
        "tags": {"type": "array", "items": {"type": "string"}},
        "none": {"type": "array"},
        "map": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "$defs": {
        "Address": {"type": "object", "properties": {"zip": {"type": "string"}}},
        "Item": {"anyOf": [{"type": "object", "properties": {"qty": {"type": "integer"}}}]},
    },
}
ORDER = {
    "ship": {"zip": "018956", "city": {"name": "Rome"}},
    "items": [{"qty": 2}, {"qty": 3}],
    "tags": ["5", "a < b"],
    "none": [],
    "map": {"item": "1"},
    "other": [1, [True]],
}


def test_tags_inside_a_value_are_objects_and_arrays() -> None:
    def machine() -> AnswerParser:
        return make_answer_parser(TOOL_FORMATS["minimax_m3"], None, schemas={"order": NESTED})

    text = minimax_m3(("order", ORDER), ("order", {}))
    said = whole(machine(), text)
    assert values(said) == [("order", ORDER), ("order", {})]
    for place in range(0, len(text), 3):
        assert cut(machine(), text, [place, place + 1]) == said
    spaced = text.replace("]<]minimax[>[<zip>", "\n]<]minimax[>[<zip>").replace(
        "</zip>", "</zip>\n"
    )
    assert whole(machine(), spaced) == said
    begun = text[: text.index("a < b") + 3]
    assert "a <" in whole(machine(), begun).calls[0][1]


@pytest.mark.parametrize("end", ["", "]<]minimax[>[</street 12>]<]minimax[>[</city>"])
def test_tags_inside_a_string_are_text_of_it(end: str) -> None:
    text = minimax_m3(PARIS).replace("Paris", "Paris]<]minimax[>[<street 12>")
    begun = text[: text.index("12>") + 3]
    assert "street 12" in whole(make("minimax_m3"), begun + end).calls[0][1]


MALFORMED = [
    ("hermes", "Hi <tool_call> I would call now"),
    ("hermes", '<tool_call>{"name": "now"'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", "<tool_call></tool_call>"),
    ("qwen3_coder", "<tool_call>\nnow()</tool_call>"),
    ("qwen3_coder", "<function=get the weather>"),
    ("llama3", '{"name": "somebody", "parameters": {}}'),
    ("llama3", '<|python_tag|>brave_search.call(query="x")'),
    ("llama4", "now (in Paris) it rains"),
    ("llama4", "[1, 2]"),
    ("llama4", '[other(a="b")]'),
    ("lfm2", "<|tool_call_start|>[now<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[now(1)]<|tool_call_end|>"),
    ("olmo3", "<function_calls>\nIt is noon.\n</function_calls>"),
    ("gemma4", "<|tool_call>call:now<tool_call|>"),
    ("gemma4", "<|tool_call>call:now{a}<tool_call|>"),
    ("mistral", "[TOOL_CALLS] no such thing"),
    ("mistral", "[TOOL_CALLS]now[ARGS]none"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
    ("deepseek_v32", "<｜DSML｜function_calls>\n</｜DSML｜function_calls>"),
    ("glm45", "<tool_call>what a call"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>"),
    ("seed_oss", "<seed:tool_call>now()</seed:tool_call>"),
    ("minimax_m2", "<minimax:tool_call>now</minimax:tool_call>"),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="get the weather">'),
    ("minimax_m3", "]<]minimax[>[<tool_call>now()]<]minimax[>[</tool_call>"),
    ("hunyuan", "<tool_calls>now</tool_calls>"),
    ("hunyuan", "<tool_calls>[1]</tool_calls>"),
    ("nemotron", "<TOOLCALL>now()</TOOLCALL>"),
    ("phi4_mini", "functools is a module"),
    ("granite", "<|tool_call|>[]"),
    ("json", '{"answer": 42}'),
    ("json", "[1, 2, 3]"),
    ("json", '{"name": "get_weather", "arguments": '),
]


@pytest.mark.parametrize(("parser", "text"), MALFORMED)
def test_what_is_no_call_is_content(parser: str, text: str) -> None:
    said = whole(make(parser), text)
    assert said == Said("", text, [])


def test_broken_arguments_are_passed_on_as_they_are() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": "say "hi""}}</tool_call> Bye'
    assert whole(make("hermes"), text) == Said("", "Bye", [("now", '{"a": "say "hi""}}')])
    cut_off = '<tool_call>{"name": "now", "arguments": {"a": "long'
    assert whole(make("hermes"), cut_off).calls == [("now", '{"a": "long')]


def test_bare_line_breaks_in_strings_become_json() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": "1\n2"}}</tool_call>'
    assert values(whole(make("hermes"), text)) == [("now", {"a": "1\n2"})]


def test_calls_as_other_shapes_of_json() -> None:
    for text in (
        '{"arguments": {"city": "Paris", "days": 2}, "name": "get_weather"}',
        '{"type": "function", "function": {"name": "get_weather", "arguments": '
        '{"city": "Paris", "days": 2}}}',
        '{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": 2}"}',
    ):
        assert values(whole(make("json"), text)) == [PARIS]
    assert whole(make("json"), '{"name": "now", "arguments": null}').calls == [("now", "{}")]


def test_arguments_stream_while_they_are_written() -> None:
    machine = make("hermes")
    (call,) = machine.push('<tool_call>{"name": "get_weather", "arguments": {"ci').calls
    assert (call.name, call.arguments) == ("get_weather", '{"ci')
    (more,) = machine.push('ty": "P').calls
    assert (more.index, more.name, more.id, more.arguments) == (0, "", "", 'ty": "P')
    machine = make("qwen3_coder")
    assert machine.push("<function=get_weather>\n<parameter=city>\nPa").calls[0].arguments == (
        '{"city": "Pa'
    )


def test_the_schema_tells_strings_from_other_values() -> None:
    text = glm45(("get_weather", {"city": "5", "days": 2, "note": "7", "other": [1]}))
    text = text.replace("</tool_call>", "<arg_key>metric</arg_key><arg_value>True</arg_value>")
    said = values(whole(make("glm45"), text + "</tool_call>"))
    wanted = {"city": "5", "days": 2, "note": "7", "other": [1], "metric": True}
    assert said == [("get_weather", wanted)]


def test_a_tag_tells_strings_where_the_schema_does_not() -> None:
    call = ("get_weather", {"other": "5", "more": 5, "note": "null", "metric": True})
    assert values(whole(make("deepseek_v4"), deepseek_v4(call))) == [call]


def test_objects_that_are_written_as_in_python_become_json() -> None:
    schema = {
        "properties": {"o": {"type": "object"}, "l": {"type": "array"}, "s": {"type": "string"}}
    }

    def read(key: str, value: str) -> Any:
        machine = make_answer_parser(TOOL_FORMATS["qwen3_coder"], None, schemas={"f": schema})
        text = f"<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>"
        ((_, arguments),) = whole(machine, text).calls
        return json.loads(arguments)[key]

    assert read("o", "{'a': 1, 'b': True, 'c': None, 1: ['\\d']}") == {
        "a": 1,
        "b": True,
        "c": None,
        "1": ["\\d"],
    }
    assert read("l", "['a', {'b': (1, 2)}]") == ["a", {"b": [1, 2]}]
    assert read("x", "{'a': 1}") == {"a": 1}
    assert read("s", "{'a': 1}") == "{'a': 1}"
    for text in ("{'a': b}", "{'a', 'b'}", "{'a': b'c'}", "{'a': 1e999}", "[" * 30_000, "(1)"):
        assert read("o", text) == text


def test_a_key_that_the_end_cuts_is_passed_on() -> None:
    text = "<function=now>\n<parameter=a>\n1\n</parameter>\n<parameter=bc"
    assert whole(make("qwen3_coder"), text).calls == [("now", '{"a": 1, "bc')]
    assert whole(make("glm45"), "<tool_call>now\n<arg_key>bc").calls == [("now", '{"bc')]


def test_kimi_keeps_the_ids_of_the_model() -> None:
    ids = [c.id for c in make("kimi_k2").push(kimi_k2(NOW, PARIS)).calls]
    assert ids == ["functions.now:0", "functions.get_weather:1"]
    (call,) = make("mistral").push(mistral_names(NOW)).calls
    assert len(call.id) == 9
    assert call.id.isalnum()


@pytest.mark.parametrize(
    ("tags", "opened", "text"),
    [
        ("think", False, "<think>\nHm, 1 < 2.\n</think>\n\nYes."),
        ("think", True, "\nHm, 1 < 2.\n</think>\n\nYes."),
        ("seed_oss", False, "<seed:think>Hm, 1 < 2.</seed:think>\nYes."),
        ("gemma4", False, "<|channel>thought\nHm, 1 < 2.<channel|>Yes."),
        ("hunyuan", False, "<think>\nHm, 1 < 2.\n</think>\n<answer>\nYes.\n</answer>"),
        ("ernie45", True, "Hm, 1 < 2.\n</think>\n\n<response>\nYes.\n</response>\n"),
        (
            "cohere",
            False,
            "<|START_THINKING|>Hm, 1 < 2.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        ),
        ("cohere", True, "Hm, 1 < 2.<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>"),
        ("minimax_m3", True, "Hm, 1 < 2.</mm:think>Yes."),
        ("hy3", True, "Hm, 1 < 2.</think:opensource>Yes."),
        ("mistral", False, "[THINK]Hm, 1 < 2.[/THINK]Yes."),
        ("granite", False, "Here is my thought process: Hm, 1 < 2. Here is my response: Yes."),
    ],
)
def test_reasoning_stands_apart(tags: str, opened: bool, text: str) -> None:
    said = whole(make("", tags, opened=opened), text)
    assert said == Said("Hm, 1 < 2.", "Yes.", [])
    assert cut(make("", tags, opened=opened), text, list(range(len(text)))) == said


def test_tags_around_content_are_dropped_with_calls_and_without_reasoning() -> None:
    text = "<|START_RESPONSE|> One moment. <|END_RESPONSE|>"
    assert whole(make("", "cohere"), text) == Said("", "One moment.", [])
    said = whole(make("cohere", "cohere"), text + cohere(PARIS, NOW))
    assert (said.content, values(said)) == ("One moment.", [PARIS, NOW])
    said = whole(make("cohere", "cohere"), cohere(PARIS) + text)
    assert (said.content, values(said)) == ("One moment.", [PARIS])
    said = whole(make("hermes", "ernie45", opened=True), "a</think>\n\n" + hermes(PARIS))
    assert (said.reasoning, said.content, values(said)) == ("a", "", [PARIS])
    said = whole(make("hermes", "ernie45"), "<response>\nSee <response> in a text.")
    assert said == Said("", "See <response> in a text.", [])


@pytest.mark.parametrize("name", [n for n, w in NAMES.items() if WRITERS[w][1]])
def test_a_call_ends_reasoning_that_has_no_end(name: str) -> None:
    parser = WRITERS[NAMES[name]][0]
    text = "<think>\nI call\n" + NAMES[name](PARIS, NOW)
    said = whole(make(parser, "think"), text)
    assert (said.reasoning, said.content, values(said)) == ("I call", "", [PARIS, NOW])
    assert cut(make(parser, "think"), text, list(range(len(text)))) == said
    said = whole(make(parser, "think", opened=True), text.removeprefix("<think>") + "\nDone.")
    assert (said.reasoning, said.content, values(said)) == ("I call", "Done.", [PARIS, NOW])


def test_reasoning_about_calls_is_reasoning() -> None:
    for text in (
        "I may use <tool_call>.",
        "as in <tool_call></tool_call>",
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        "<tool_call>",
        '<tool_call> {"name": "now"',
    ):
        assert whole(make("hermes", "think"), f"<think>{text}</think>Hi").reasoning == text
        assert whole(make("hermes", "think", opened=True), text) == Said(text, "", [])
    text = "<think>" + hermes(NOW) + "\n</think>\nHi"
    assert whole(make("hermes", "think"), text) == Said("", "Hi", [("now", "{}")])


def test_reasoning_then_calls() -> None:
    text = "<think>\nI call <tool_call>.\n</think>\n\n" + hermes(PARIS)
    said = whole(make("hermes", "think"), text)
    assert (said.reasoning, said.content, values(said)) == ("I call <tool_call>.", "", [PARIS])
    said = whole(make("json", "think"), "<think>a</think>\n" + bare_list(PARIS))
    assert (said.reasoning, said.content, values(said)) == ("a", "", [PARIS])


def test_answers_without_reasoning_are_content() -> None:
    for text in ("Yes.", " \n Yes ", "I <think> so", "<thin", ""):
        assert whole(make("", "think"), text) == Said("", text, [])
    assert whole(make("", "think"), "<think>\nno end ") == Said("no end ", "", [])
    assert whole(make("", "think", opened=True), "a </thin") == Said("a </thin", "", [])

# DeepSeek's tokens have full-width bars.
# ruff: noqa: RUF001

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import BadRequest, ConfigError
from tandem.models.chat_template import ChatTemplate

USER = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: list[dict] = USER, *, prompt: bool = True, **special: str) -> str:
    return ChatTemplate(source, special).render(messages, add_generation_prompt=prompt)


def test_blocks_leave_no_lines_behind():
    body = "  {% if true %}\n{{ message.content }}!\n  {% endif %}\n"
    source = "{% for message in messages %}\n" + body + "{% endfor %}\n"
    assert render(source) == "Hi!\n"


def test_special_tokens_and_the_generation_prompt():
    source = (
        "{{ bos_token }}{% if add_generation_prompt %}A:{% endif %}{{ eos_token }}{{ pad_token }}"
    )
    assert render(source, bos_token="<s>", eos_token="</s>") == "<s>A:</s>"
    assert render(source, prompt=False, bos_token="<s>") == "<s>"


def test_tojson_leaves_html_and_letters_alone():
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"


def test_the_date_generation_blocks_and_loop_controls():
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)
    assert render("{% generation %}x{{ messages[0].content }}{% endgeneration %}") == "xHi"
    assert (
        render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "01"
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "chat template refuses"),
        ("{{ messages.nothing.more }}", "no attribute 'nothing'"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_that_fails_is_the_requests_fault(source, message):
    with pytest.raises(BadRequest, match=message) as raised:
        render(source)
    assert raised.value.param == "messages"


def test_a_template_that_is_none_is_found_at_start():
    with pytest.raises(ConfigError, match="cannot be compiled"):
        ChatTemplate("{% for %}", {})


CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
CALLED = [*USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
LOOP = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
END = "{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "arguments",
    [
        "{{ c.function.arguments | tojson }}",
        "{{ '' + c.function.arguments }}",
        "{{ c.function.arguments }}",
        "{% if c.function.arguments is string %}{{ c.function.arguments }}"
        "{% else %}{{ c.function.arguments | tojson }}{% endif %}",
    ],
)
def test_arguments_are_json_however_the_template_writes_them(arguments):
    assert render(LOOP + arguments + END, CALLED) == '{"a": "b"}'


def test_the_variables_of_a_template():
    source = (
        "{% if not tools is defined %}{% set tools = none %}{% endif %}"
        "{% set ns = namespace(a=1) %}"
        "{{ ns.a }}{{ bos_token }}{% if thinking is defined %}{{ raise_exception('x') }}{% endif %}"
        "{{ messages }}{% if add_generation_prompt %}{% endif %}"
    )
    variables = ChatTemplate(source, {}).variables
    assert variables == {"tools", "thinking", "add_generation_prompt"}


def test_options_and_tools_reach_the_template():
    template = ChatTemplate("{{ tools[0].function.name }} {{ thinking }}", {})
    tools = [{"function": {"name": "f"}}]
    options = {"thinking": True}
    rendered = template.render(USER, add_generation_prompt=True, tools=tools, options=options)
    assert rendered == "f True"


def test_where_the_template_is_looked_for(tmp_path):
    assert ChatTemplate.from_folder(tmp_path, {}) is None
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    for config, expected in (
        ({"chat_template": "c{{ bos_token }}", "bos_token": {"content": "<s>"}}, "c<s>"),
        ({"chat_template": named}, "d"),
    ):
        template = ChatTemplate.from_folder(tmp_path, config)
        assert template is not None
        assert template.render(USER, add_generation_prompt=True) == expected
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
    template = ChatTemplate.from_folder(tmp_path, {})
    assert template is not None
    assert template.render(USER, add_generation_prompt=True) == "json"
    (tmp_path / "chat_template.jinja").write_text("file")
    template = ChatTemplate.from_folder(tmp_path, {"chat_template": "c"})
    assert template is not None
    assert template.render(USER, add_generation_prompt=True) == "file"


def message_of(kind: str) -> dict[str, Any]:
    """Returns an assistant's message with the parts that `kind` names."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    if "text" in kind:
        message["content"] = "Text."
    if "empty" in kind:
        message["content"] = ""
    if "reasoning" in kind:
        message["reasoning_content"] = "Hm."
    if "call" in kind:
        message["tool_calls"] = [CALL]
    return message


CALLS = "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
# The traits of public templates: how each of them writes the assistant's message `m`.
TRAITS = {
    "searches the content": "{% if 'content' in m and '<x>' in m.content %}!{% endif %}" + CALLS,
    "prints the content": "{{ m.content }}" + CALLS,
    "strips the content": "{{ m.content | trim }}" + CALLS,
    "adds the content": "{{ '' + m.content }}" + CALLS,
    "asks for the content": "{{ '' if m.content is none else m.content + '' }}" + CALLS,
    "has calls instead of content": "{% if m.content is none %}" + CALLS + "{% else %}"
    "{{ '' + m.content }}{% endif %}",
    "gets the content": "{{ m.get('content') or '' }}" + CALLS,
    "wants a text": "{% if m.content is not string %}{{ raise_exception('no text') }}{% endif %}"
    + CALLS,
    "names thinking": "{% if m.tool_calls and m.content and m.thinking %}"
    "{{ raise_exception('both') }}{% endif %}"
    "{% if m.thinking %}<{{ m.thinking }}>{% endif %}{{ m.content }}" + CALLS,
    "names reasoning": "{% if m.reasoning %}<{{ m.reasoning }}>{% endif %}{{ m.content }}" + CALLS,
    "names reasoning_content": "<{{ m.get('reasoning_content', '') }}>{{ m.content }}" + CALLS,
    "prefers one name": "{{ m.reasoning or m.reasoning_content }}{{ m.content }}" + CALLS,
    "has parts of thinking": "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p[p.type] }}{% endfor %}{% endif %}{# thinking #}" + CALLS,
    "wants calls as text": "{{ m.content }}{{ m.reasoning_content }}"
    "{% for c in m.tool_calls %}{{ '' + c.function.arguments }}{% endfor %}",
}
KINDS = ("call", "empty call", "text call", "reasoning", "text reasoning")


@pytest.mark.parametrize("kind", [*KINDS, "reasoning call", "text reasoning call"])
@pytest.mark.parametrize("trait", TRAITS)
def test_nothing_that_a_template_can_show_is_lost(trait: str, kind: str) -> None:
    source = "{% for m in messages %}{% if m.role == 'assistant' %}" + TRAITS[trait]
    source += "{% else %}{{ m.role }}{% endif %};{% endfor %}"
    result = {"role": "tool", "tool_call_id": "abcdefghi", "content": "21"}
    rendered = render(source, [*USER, message_of(kind), result if "call" in kind else USER[0]])
    assert "None" not in rendered
    if "call" in kind:
        assert rendered.count('{"a": "b"}') == 1
    if "reasoning" in kind and ("reason" in TRAITS[trait] or "think" in TRAITS[trait]):
        assert rendered.count("Hm.") == 1
    if "text" in kind and trait != "wants a text" and "search" not in trait:
        assert rendered.count("Text.") == 1


@pytest.mark.parametrize(
    "one_call",
    [
        "{{ m.tool_calls[0].function.arguments | tojson }}",
        "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}" + CALLS,
    ],
)
def test_a_template_for_one_call_gets_one_call_a_message(one_call: str) -> None:
    source = "{% for m in messages %}{{ m.role[0] }}{{ m.reasoning_content }}{{ m.content }}"
    source += "{% if m.tool_calls %}" + one_call + "{% endif %};{% endfor %}"
    calls = [
        {"id": n, "type": "function", "function": {"name": "f", "arguments": {"n": int(n)}}}
        for n in "123"
    ]
    said = {"role": "assistant", "content": "T", "reasoning_content": "R", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": n, "content": f"r{n}"} for n in "213"]
    rendered = render(source, [*USER, said, *results, {"role": "assistant", "content": "E"}])
    assert rendered == 'uHi;aRT{"n": 1};tr1;a{"n": 2};tr2;a{"n": 3};tr3;aE;'


def test_a_null_key_is_absent_unless_the_template_wants_it_null() -> None:
    call = message_of("call")
    for source, shown in (
        ("{{ 'content' in messages[1] }}", "False"),
        ("{{ 'name' in messages[1] }}", "False"),
        ("{% for m in messages if m.content is none %}" + CALLS + "{% endfor %}", '{"a": "b"}'),
    ):
        assert render(source, [*USER, {**call, "name": None}]) == shown


def test_parts_of_a_content_are_joined_by_lines_unless_the_template_reads_them() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    listed = "{% for p in m.content %}[{{ p.text }}]{% endfor %}"
    both = "{% if m.content is string %}{{ m.content }}{% else %}" + listed + "{% endif %}"
    of_users = "{% if m.role == 'user' %}" + both + "{% else %}{{ m.content }}{% endif %}"
    for one, shown in (
        ("{{ m.content }}", "a\nb;a\nb;a\nb;c;"),
        ("{{ m.content | trim + '' }}", "a\nb;a\nb;a\nb;c;"),
        ("{{ m.content | tojson }}", '"a\\nb";"a\\nb";"a\\nb";"c";'),
        (both, "[a][b];[a][b];[a][b];c;"),
        (of_users, "a\nb;[a][b];a\nb;c;"),
        (listed, "[a][b];[a][b];[a][b];[c];"),
    ):
        chat: list[dict[str, Any]] = [
            *({"role": role, "content": parts} for role in ("system", "user", "assistant")),
            {"role": "user", "content": "c"},
        ]
        assert render("{% for m in messages %}" + one + ";{% endfor %}", chat) == shown


def test_the_template_tells_whether_it_takes_a_system_message() -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    users = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    everybody = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for source, takes in ((refuses + everybody, False), (users, False), (everybody, True)):
        assert ChatTemplate(source, {}).takes_system is takes


def test_chats_with_tools_have_a_template_of_their_own(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "{{ tools }}"}]
    config = {"chat_template": named}
    for with_tools in ("[1]", "file"):
        template = ChatTemplate.from_folder(tmp_path, config)
        assert template is not None
        assert template.render(USER, add_generation_prompt=True) == "d"
        tools: Any = [1]
        assert template.render(USER, add_generation_prompt=True, tools=tools) == with_tools
        (tmp_path / "additional_chat_templates").mkdir(exist_ok=True)
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file")
    assert "tools" in template.variables or template.tool_use is not None
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").unlink()
    (tmp_path / "chat_template.jinja").write_text("own")
    template = ChatTemplate.from_folder(tmp_path, config)
    assert template is not None
    assert template.render(USER, add_generation_prompt=True, tools=tools) == "own"


@pytest.mark.parametrize("has_added_tokens", [False, True])
def test_special_tokens_are_those_of_transformers(has_added_tokens: bool, tmp_path: Path) -> None:
    """transformers reads special_tokens_map.json only where the other file lists no tokens."""
    names = [f"{n}_token" for n in ("bos", "eos", "unk", "sep", "pad", "cls", "mask", "image")]
    (tmp_path / "chat_template.jinja").write_text("{{ " + " ~ '|' ~ ".join(names) + " }}")
    config = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "unk_token": None,
        "extra_special_tokens": {"image_token": "<image>"},
    }
    if has_added_tokens:
        config["added_tokens_decoder"] = {}
    special = {"eos_token": {"content": "<e>"}, "sep_token": "<sep>", "cls_token": "<cls>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    template = ChatTemplate.from_folder(tmp_path, config)
    assert template is not None
    assert not template.variables
    eos = "</s>" if has_added_tokens else "<e>"
    rendered = template.render(USER, add_generation_prompt=True)
    assert rendered == f"<s>|{eos}||<sep>||<cls>||<image>"


def test_transformers_renders_the_same(tmp_path):
    """Llama 3.1's shape: dates, tools looked for, loops with conditions, trimmed contents."""
    import transformers

    source = """{{- bos_token }}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- set ns.count = ns.count + 1 %}
    {{- '<|' + message['role'] + '|>\\n' + message['content'] | trim + eos_token }}
{%- endfor %}
{{ ns.count }} {{ strftime_now("%d %b %Y") }} {{ messages | tojson }}
{% if add_generation_prompt %}
    {{- '<|assistant|>' }}
{% endif %}
"""
    backend = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    messages = [{"role": "system", "content": " Be <brief>. "}, *USER]
    expected = theirs.apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=True
    )
    assert render(source, messages, bos_token="<s>", eos_token="</s>") == expected


def deepseek(version: str, folder: Path) -> ChatTemplate:
    (folder / "config.json").write_text(json.dumps({"model_type": f"deepseek_{version}"}))
    template = ChatTemplate.from_folder(folder, {})
    assert template is not None
    return template


def deepseek_chat() -> list[dict[str, Any]]:
    """Returns a chat with two calls, whose results come in the other order."""
    calls = [
        {"id": i, "type": "function", "function": {"name": "f", "arguments": arguments}}
        for i, arguments in (("1", {"a": "b\n", "n": [1, None]}), ("2", {}))
    ]
    return [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U1"},
        {"role": "assistant", "content": "A1", "reasoning_content": "R1"},
        {"role": "user", "content": "U2"},
        {"role": "assistant", "content": None, "reasoning_content": "R2", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "2", "content": "T2"},
        {"role": "tool", "tool_call_id": "1", "content": "T1"},
    ]


DEEPSEEK_CALLS = (
    '<｜DSML｜{0}>\n<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="a" string="true">b\n</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">[1, null]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="f">\n\n</｜DSML｜invoke>\n</｜DSML｜{0}><｜end▁of▁sentence｜>'
)


def test_deepseek_v3_2_has_a_built_in_template(tmp_path: Path) -> None:
    """The format of encoding_dsv32.py in the model's repository."""
    template = deepseek("v32", tmp_path)
    assert template.shows_calls
    assert template.shows_results
    assert {"thinking", "enable_thinking", "tools"} <= template.variables
    chat = deepseek_chat()
    calls = DEEPSEEK_CALLS.format("function_calls")
    results = (
        "\n\n<function_results>\n<result>T2</result>\n<result>T1</result>\n</function_results>"
    )
    for thinking, think, after in ((True, "<think>", "R2</think>"), (False, "</think>", "")):
        rendered = template.render(chat, add_generation_prompt=True, options={"thinking": thinking})
        assert rendered == (
            "<｜begin▁of▁sentence｜>S<｜User｜>U1<｜Assistant｜></think>A1<｜end▁of▁sentence｜>"
            f"<｜User｜>U2<｜Assistant｜>{think}{after}\n\n{calls}{results}\n\n{think}"
        )
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"é": 1}}}]
    rendered = template.render(chat[1:2], add_generation_prompt=True, tools=tools)
    assert rendered.startswith("<｜begin▁of▁sentence｜>\n\n## Tools\nYou have access")
    listed = '<functions>\n{"name": "f", "parameters": {"é": 1}}\n</functions>\n'
    assert rendered.endswith(f"{listed}<｜User｜>U1<｜Assistant｜></think>")
    rendered = template.render(chat[:2], add_generation_prompt=True, tools=tools)
    assert rendered.startswith("<｜begin▁of▁sentence｜>S\n\n## Tools\n")


def test_deepseek_v4_has_a_built_in_template(tmp_path: Path) -> None:
    """The format of encoding_dsv4.py in the model's repository."""
    template = deepseek("v4", tmp_path)
    assert template.shows_calls
    assert template.shows_results
    chat = deepseek_chat()
    calls = DEEPSEEK_CALLS.format("tool_calls")
    results = "<｜User｜><tool_result>T1</tool_result>\n\n<tool_result>T2</tool_result>"
    tools = [{"type": "function", "function": {"name": name}} for name in "fg"]

    def rendered(tools: Any, **options: Any) -> str:
        return template.render(chat, add_generation_prompt=True, tools=tools, options=options)

    assert rendered(None) == (
        "<｜begin▁of▁sentence｜>S<｜User｜>U1<｜Assistant｜></think>A1<｜end▁of▁sentence｜>"
        f"<｜User｜>U2<｜Assistant｜></think>\n\n{calls}{results}<｜Assistant｜></think>"
    )
    assert rendered(None, thinking=True) == (
        "<｜begin▁of▁sentence｜>S<｜User｜>U1<｜Assistant｜></think>A1<｜end▁of▁sentence｜>"
        f"<｜User｜>U2<｜Assistant｜></think>\n\n{calls}{results}<｜Assistant｜><think>"
    )
    shown = rendered(tools, thinking=True, reasoning_effort="max")
    assert shown.startswith("<｜begin▁of▁sentence｜>Reasoning Effort: Absolute maximum")
    assert "\n\nS\n\n## Tools\n\nYou have access to a set of tools to help" in shown
    assert '### Available Tool Schemas\n\n{"name": "f"}\n{"name": "g"}\n\nYou MUST' in shown
    assert shown.endswith(
        "to invoke tool calls.\n<｜User｜>U1<｜Assistant｜><think>R1</think>A1<｜end▁of▁sentence｜>"
        f"<｜User｜>U2<｜Assistant｜><think>R2</think>\n\n{calls}{results}<｜Assistant｜><think>"
    )
    chat.append({"role": "user", "content": "U3"})
    assert rendered(None).endswith(f"{results}\n\nU3<｜Assistant｜></think>")


NINE = (
    LOOP
    + "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}{{ c.id }} {% endfor %}"
    + "{% if m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine') }}"
    + "{% endif %}{{ m.tool_call_id }}{% endif %}{% endfor %}"
)


def with_id(call_id: str) -> list[dict[str, Any]]:
    """Returns a chat with a call that has this id, and its result."""
    called = {"role": "assistant", "content": None, "tool_calls": [{**CALL, "id": call_id}]}
    return [*USER, called, {"role": "tool", "tool_call_id": call_id, "content": "21"}]


def test_a_template_that_wants_short_ids_gets_them() -> None:
    """Mistral's refuse any other, and clients bring calls that another model made."""
    template = ChatTemplate(NINE, {})
    for other in ("call_0123456789abcdef", "toolu_01", "chatcmpl-tool-1"):
        call, result = template.render(with_id(other), add_generation_prompt=True).split()
        assert call == result
        assert call.isalnum()
        assert template.render(with_id(other), add_generation_prompt=True).startswith(call)
    assert template.render(with_id("AbC123def"), add_generation_prompt=True).split()[0] == (
        "AbC123def"
    )
    any_id = LOOP + "{{ c.id }}" + END
    assert render(any_id, with_id("toolu_01")) == "toolu_01"


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_an_empty_text_is_a_part_where_content_is_parts(role: str) -> None:
    source = (
        "{% for m in messages %}[{% if m.content[0].type != 'text' %}{{ raise_exception('x') }}"
        "{% endif %}{% for part in m.content %}{{ part.text }}{% endfor %}]{% endfor %}"
    )
    assert render(source, [{"role": role, "content": ""}, *USER]) == "[][Hi]"


@pytest.mark.parametrize(
    ("tool", "is_shown"),
    [
        ("{{ m.content }}", True),
        ("", False),
        ("{{ raise_exception('no tools') }}", True),
        ("{{ raise_exception('no call') if not ns.calls }}{{ m.content }}", True),
    ],
)
def test_results_are_shown_or_not(tool: str, is_shown: bool) -> None:
    """A refusal is an error that the client gets."""
    source = (
        "{% set ns = namespace(calls=0) %}{% for m in messages %}{% if m.role == 'tool' %}"
        + tool
        + "{% else %}{% for c in m.tool_calls or [] %}{% set ns.calls = 1 %}"
        + "{{ c.function.arguments }}{% endfor %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert ChatTemplate(source, {}).shows_results == is_shown


HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "hides the clock": "{% set check_clock = 1 %}{% for a in range(99999) %}"
    "{% for b in range(99999) if 0 %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "recursive loop": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "power": "{{ 10 ** 10000000 }}",
    "repeated text": "{{ 'a' * 10 ** 11 }}",
    "repeated list": "{{ ([0] * 10 ** 6 * 10 ** 6)|length }}",
    "repeated squares": "{% set n = namespace(x=3) %}{% for a in range(99999) %}"
    "{% set n.x = n.x * n.x %}{% endfor %}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_template_that_works_for_ever_is_refused(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.models.chat_template.RENDER_S_MAX", 0.1)
    template = ChatTemplate(source, {})
    started = time.monotonic()
    with pytest.raises(BadRequest, match="chat template refuses"):
        template.render([{"role": "user", "content": "x"}], add_generation_prompt=True)
    assert time.monotonic() - started < 2.0


def test_products_of_templates_that_people_write_are_computed() -> None:
    source = "{{ '=' * 20 }}{{ 2 ** 10 }}{{ 3 * 0.5 }}{{ [1, 2] * 2 }}{{ 2 ** 0.5 > 1 }}"
    text = ChatTemplate(source, {}).render([], add_generation_prompt=False)
    assert text == "=" * 20 + "10241.5[1, 2, 1, 2]True"


_ALTERNATES = (
    "{% set own = messages | rejectattr('role', 'equalto', 'system') | list %}"
    "{% for m in own %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
_SAYS = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}"
_ONLY_FIRST = (  # Qwen3.5 and later
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
)
_NO_SYSTEM = (  # Gemma 2
    "{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
)
_DROPS_LATER = (  # Qwen3-VL and gpt-oss
    "{% for m in messages %}{% if loop.first or m.role != 'system' %}"
    "{{ m.role[0] }}:{{ m.content }}|{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (_SAYS, "s:A|s:B|u:x|s:C|a:y|s:D|u:z|"),
        (_ALTERNATES + _SAYS, "s:A|s:B|u:x|s:C|a:y|s:D|u:z|"),
        (_ONLY_FIRST + _SAYS, "s:A\n\nB|u:x\n\nC|a:y|u:D\n\nz|"),
        (_NO_SYSTEM + _ONLY_FIRST + _SAYS, "u:A\n\nB\n\nx\n\nC|a:y|u:D\n\nz|"),
        (_DROPS_LATER, "s:A\n\nB|u:x\n\nC|a:y|u:D\n\nz|"),
        (_ALTERNATES + _ONLY_FIRST + _SAYS, "s:A\n\nB|u:x\n\nC|a:y|u:D\n\nz|"),
    ],
)
def test_no_system_message_is_refused_or_lost(source: str, expected: str) -> None:
    """Codex sends two at the beginning, and Claude Code sends some within the conversation."""
    said = (("system", "A"), ("system", "B"), ("user", "x"), ("system", "C"))
    said += (("assistant", "y"), ("system", "D"), ("user", "z"))
    messages = [{"role": role, "content": content} for role, content in said]
    assert render(source, messages) == expected
    two = [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]
    assert render(source, two) == ("u:x\n\ny|" if "alternate" in source else "u:x|u:y|")


def test_a_system_message_alone_is_the_users_where_the_template_needs_one() -> None:
    needs = (  # Qwen3.5
        "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
        "{{ raise_exception('No user query found in messages.') }}{% endif %}"
    )
    alone = [{"role": "system", "content": "A"}]
    assert render(needs + _SAYS, alone) == "u:A|"
    assert render(needs + _SAYS, [*alone, *USER]) == "s:A|u:Hi|"
    assert render(_SAYS, alone) == "s:A|"


def test_words_after_a_result_are_a_part_of_it_where_roles_must_alternate() -> None:
    """Agents send such words when their user stops a call, and Claude Code sends reminders."""
    own = "messages | rejectattr('role', 'equalto', 'tool') | rejectattr('tool_calls') | list"
    alternates = f"{{% set own = {own} %}}{_ALTERNATES.partition('%}')[2]}"
    says = (
        "{% for m in messages %}{{ m.role[0] }}:{% for call in m.tool_calls or [] %}"
        "{{ call.function.arguments }}{% endfor %}{{ m.content }}|{% endfor %}"
    )
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "4"},
        {"role": "user", "content": "Stop."},
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "Yes."},
    ]
    assert render(alternates + says, messages).endswith("t:4\n\nStop.\n\nGo.|a:Yes.|")
    assert render(says, messages).endswith("t:4|u:Stop.|u:Go.|a:Yes.|")


def test_system_messages_of_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    messages = [
        {"role": "system", "content": parts},
        {"role": "system", "content": "C"},
        {"role": "user", "content": "x"},
    ]
    assert render(_ONLY_FIRST + _SAYS, messages) == "s:A\nB\nC|u:x|"

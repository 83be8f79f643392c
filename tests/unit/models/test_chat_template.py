import json
import time
from datetime import datetime

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
    (tmp_path / "chat_template.jinja").write_text("file")
    template = ChatTemplate.from_folder(tmp_path, {"chat_template": "c"})
    assert template is not None
    assert template.render(USER, add_generation_prompt=True) == "file"


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

"""Constructs of this year's chat templates are rendered as transformers renders them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.models.chat_template import ChatTemplate

CALLS = [
    {
        "id": "a",
        "type": "function",
        "function": {"name": "find", "arguments": {"q": "é <b>", "n": 2}},
    },
    {"id": "b", "type": "function", "function": {"name": "now", "arguments": {}}},
]
PARAMETERS = {
    "type": "object",
    "properties": {
        "q": {"type": "string", "description": "What & where"},
        "n": {"type": "integer", "nullable": True},
    },
    "required": ["q"],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "find", "description": "d", "parameters": PARAMETERS},
    },
    {"type": "function", "function": {"name": "now", "description": "é"}},
]
USER = {"role": "user", "content": " Hi <x> "}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "turns": [
        USER,
        {"role": "assistant", "content": "A.", "reasoning_content": "Hm."},
        USER,
        {"role": "assistant", "content": "B.", "reasoning_content": "So."},
    ],
    "calls": [
        {"role": "system", "content": "S"},
        USER,
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "a", "name": "find", "content": "21"},
        {"role": "tool", "tool_call_id": "b", "name": "now", "content": '{"t": 9}'},
        {"role": "assistant", "content": "Done."},
        USER,
    ],
}

# Each file is written for this test, with the constructs that the family's own template uses.
FOLDER = Path(__file__).parents[2] / "data/chat_templates"
FAMILIES = sorted(file.stem for file in FOLDER.glob("*.jinja"))


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_renders_the_same(family: str, chat: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = json.loads(json.dumps(CHATS[chat]))
    tokens = {"bos_token": "<s>"}
    source = (FOLDER / f"{family}.jinja").read_text()
    template = ChatTemplate(source, tokens)
    for tools in (None, TOOLS):
        for options in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
            theirs, _ = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=source,
                add_generation_prompt=True,
                **tokens,
                **options,
            )
            ours = template.render(
                messages, add_generation_prompt=True, tools=tools, options=options
            )
            assert ours == theirs[0]

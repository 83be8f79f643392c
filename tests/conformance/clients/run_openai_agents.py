# /// script
# dependencies = ["openai-agents"]
# ///
"""OpenAI's agents for Python, with responses and chats."""

from __future__ import annotations

import sys

from agent_loop import check_loop
from checks import run
from scripted import Workplace

place = Workplace("openai_agents")
_BASE = f"{place.proxy.url}/v1"
_ENV = {"OPENAI_BASE_URL": _BASE, "OPENAI_API_KEY": "none"}


def loops_with_responses() -> None:
    check_loop(place, _BASE, sys.executable, "openai_agents.py", API="responses", **_ENV)


def loops_with_chats() -> None:
    check_loop(place, _BASE, sys.executable, "openai_agents.py", API="chat_completions", **_ENV)


run(loops_with_responses, loops_with_chats)

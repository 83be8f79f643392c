# /// script
# dependencies = []
# ///
"""The JDK's HTTP client, which asks for HTTP/2 over clear text: a call, and its result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from checks import run
from scripted import BEFORE, NAME, Workplace, call

place = Workplace("jdk")
_PROGRAM = Path(__file__).parent / "Post.java"
_READ = {"type": "function", "function": {"name": "read_file", "parameters": {"type": "object"}}}


def _ask(messages: list[Any], **more: Any) -> str:
    body = {"model": place.model, "messages": messages, "tools": [_READ], "max_tokens": 60, **more}
    file = place.folder / "body.json"
    file.write_text(json.dumps(body))
    return place.run("java", str(_PROGRAM), f"{place.proxy.url}/v1/chat/completions", str(file))


def loops() -> None:
    messages: list[Any] = [{"role": "user", "content": f"Read {NAME}."}]
    place.proxy.script(call("read_file", path=NAME))
    message = json.loads(_ask(messages))["choices"][0]["message"]
    (made,) = message["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"path": NAME}
    result = {"role": "tool", "tool_call_id": made["id"], "content": BEFORE}
    place.proxy.script(BEFORE)
    said = json.loads(_ask([*messages, message, result]))["choices"][0]["message"]
    assert said["content"] == BEFORE


def streams() -> None:
    place.proxy.script(BEFORE)
    said = _ask([{"role": "user", "content": f"Read {NAME}."}], stream=True)
    assert said.rstrip().endswith("data: [DONE]")


run(loops, streams)

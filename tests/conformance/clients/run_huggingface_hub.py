# /// script
# dependencies = ["huggingface_hub"]
# ///
"""The client of huggingface_hub: a streamed call of a tool, and an answer with its result."""

from __future__ import annotations

import json
from typing import Any

from checks import run
from huggingface_hub import InferenceClient
from scripted import AFTER, BEFORE, NAME, Workplace, call

place = Workplace("huggingface_hub")
client = InferenceClient(base_url=place.proxy.url, api_key="none")
_READ = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Reads a file",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}


def loops() -> None:
    messages: list[Any] = [{"role": "user", "content": f"Read {NAME}."}]
    place.proxy.script(call("read_file", path=NAME), f"{BEFORE}\u2028{AFTER}\u0085")
    name = arguments = call_id = ""
    for chunk in client.chat_completion(
        model=place.model, messages=messages, tools=[_READ], stream=True, max_tokens=100
    ):
        for part in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
            name += part.function.name or ""
            arguments += part.function.arguments or ""
            call_id = part.id or call_id
    assert (name, json.loads(arguments)) == ("read_file", {"path": NAME})
    function = {"name": name, "arguments": arguments}
    made = {"id": call_id, "type": "function", "function": function}
    messages.append({"role": "assistant", "content": None, "tool_calls": [made]})
    messages.append({"role": "tool", "tool_call_id": call_id, "content": BEFORE})
    said = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in client.chat_completion(
            model=place.model, messages=messages, tools=[_READ], stream=True, max_tokens=100
        )
        if chunk.choices
    )
    assert said == f"{BEFORE}\u2028{AFTER}\u0085", said
    place.proxy.check()


run(loops)

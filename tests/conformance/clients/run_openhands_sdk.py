# /// script
# requires-python = ">=3.12"
# dependencies = ["openhands-sdk", "openhands-tools"]
# ///
"""OpenHands' SDK: reads a file, edits it and answers; a second turn in another process."""

from __future__ import annotations

import sys
from pathlib import Path

from checks import run
from scripted import AFTER, BEFORE, NAME, Workplace, call

place = Workplace("openhands_sdk")
_FILE = str(place.file)
_PROGRAM = str(Path(__file__).parent / "openhands_turn.py")
_ENV = {
    "BASE_URL": f"{place.proxy.url}/v1",
    "MODEL": place.model,
    "KEPT": str(place.home / "kept"),
    "OPENHANDS_SUPPRESS_BANNER": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


def edits() -> None:
    place.proxy.script(
        call("file_editor", command="view", path=_FILE),
        call("file_editor", command="str_replace", path=_FILE, old_str=BEFORE, new_str=AFTER),
        "The sea is blue now.",
    )
    said = place.run(sys.executable, _PROGRAM, f"Make the sea in {NAME} blue.", more=_ENV)
    assert "blue now" in said, said
    place.check_edited()


def resumes() -> None:
    place.proxy.script("It was green.")
    said = place.run(sys.executable, _PROGRAM, "What was it before?", more=_ENV)
    assert "It was green." in said, said
    (_, _, body) = place.proxy.requests[-1]
    assert "blue now" in str(body["messages"])


run(edits, resumes)

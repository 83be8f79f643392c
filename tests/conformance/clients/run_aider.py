# /// script
# dependencies = ["aider-chat"]
# ///
"""Aider: edits a file by a block in its answer; a second turn with the restored history."""

from __future__ import annotations

from checks import run
from scripted import AFTER, BEFORE, NAME, Workplace

place = Workplace("aider", answers_without_tools=True)
_ENV = {
    "OPENAI_API_KEY": "none",
    "OPENAI_API_BASE": f"{place.proxy.url}/v1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
_AIDER = (
    *("aider", "--model", f"openai/{place.model}", "--yes-always", "--no-auto-commits"),
    *("--no-show-model-warnings", "--analytics-disable", "--no-check-update"),
    *("--no-show-release-notes", "--edit-format", "diff", "--map-tokens", "0", "--no-pretty"),
    *("--no-gitignore", "--no-detect-urls"),
)
_BLOCK = f"{NAME}\n```\n<<<<<<< SEARCH\n{BEFORE}\n=======\n{AFTER}\n>>>>>>> REPLACE\n```\n"


def edits() -> None:
    place.proxy.script(f"The sea is blue now.\n\n{_BLOCK}")
    said = place.run(*_AIDER, "--message", f"Make the sea in {NAME} blue.", NAME, more=_ENV)
    assert "blue now" in said, said
    place.check_edited()


def resumes() -> None:
    place.proxy.script("It was green.")
    ask = ("--restore-chat-history", "--message", "What was it before?")
    said = place.run(*_AIDER, *ask, NAME, more=_ENV)
    assert "It was green." in said, said
    (_, _, body) = place.proxy.requests[-1]
    assert any("The sea is blue now." in str(message["content"]) for message in body["messages"])


run(edits, resumes)

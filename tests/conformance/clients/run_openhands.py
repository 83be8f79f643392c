# /// script
# requires-python = ">=3.12"
# dependencies = ["openhands"]
# ///
"""OpenHands' command line without a screen: reads a file, edits it and answers; a second turn that
resumes the conversation."""

from __future__ import annotations

from checks import run
from scripted import AFTER, BEFORE, NAME, Workplace, call

place = Workplace("openhands")
_FILE = str(place.file)
_ENV = {
    "LLM_API_KEY": "none",
    "LLM_BASE_URL": f"{place.proxy.url}/v1",
    "LLM_MODEL": f"openai/{place.model}",
    "OPENHANDS_SUPPRESS_BANNER": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
_OPENHANDS = ("openhands", "--headless", "--json", "--override-with-envs")


def _edit(**arguments: str) -> str:
    return call("file_editor", path=_FILE, security_risk="LOW", **arguments)


def edits() -> None:
    place.proxy.script(
        _edit(command="view"),
        _edit(command="str_replace", old_str=BEFORE, new_str=AFTER),
        "The sea is blue now.",
    )
    said = place.run(*_OPENHANDS, "--task", f"Make the sea in {NAME} blue.", more=_ENV)
    assert "blue now" in said, said
    place.check_edited()


def resumes() -> None:
    place.proxy.script("It was green.")
    resume = ("--resume", "--last", "--task", "What was it before?")
    said = place.run(*_OPENHANDS, *resume, more=_ENV)
    assert "It was green." in said, said
    (_, _, body) = place.proxy.requests[-1]
    assert "blue now" in str(body["messages"])


run(edits, resumes)

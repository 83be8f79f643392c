"""The main job of a library for agents: a loop that reads a file, edits it and answers, and a
second turn of the same conversation.

A program in JavaScript or Python gets these variables: BASE_URL, MODEL, FILE, FIRST and SECOND (the
questions), and prints the two answers, one a line. Its tools are `read_file` with `path`, and
`edit_file` with `path`, `old` and `new`.
"""

from __future__ import annotations

import os
from pathlib import Path

from scripted import AFTER, BEFORE, NAME, Workplace, call

_HERE = Path(__file__).parent


def check_loop(place: Workplace, base_url: str, *command: str, **more: str) -> None:
    """Runs the loop as the program `command`, whose last part is a file of this folder. Raises
    AssertionError if the file or an answer is wrong."""
    place.file.write_text(BEFORE + "\n")
    place.proxy.script(
        call("read_file", path=NAME),
        call("edit_file", path=NAME, old=BEFORE, new=AFTER),
        "The sea is blue now.",
        "It was green.",
    )
    *interpreter, name = command
    program = place.folder / name
    program.write_text((_HERE / name).read_text())
    modules = place.folder / "node_modules"
    if name.endswith(".mjs") and not modules.exists():
        modules.symlink_to(os.environ["NODE_PATH"])
    given = {
        "BASE_URL": base_url,
        "MODEL": place.model,
        "FILE": str(place.file),
        "FIRST": f"Make the sea in {NAME} blue.",
        "SECOND": "What was it before?",
        **more,
    }
    said = place.run(*interpreter, str(program), more=given)
    answers = [line for line in said.splitlines() if line.strip()]
    assert answers[-2:] == ["The sea is blue now.", "It was green."], said
    place.check_edited()

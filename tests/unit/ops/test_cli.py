"""The one command: usage errors take one line, and programs get their arguments untouched."""

import json
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import pytest

import tandem as tandem_package


def tandem(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tandem.ops.cli", *arguments],
        env={**os.environ, "XDG_STATE_HOME": "/nonexistent"},  # no clusters of this user run
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("arguments", "status", "names"),
    [
        (["bogus"], 2, "bogus"),
        (["scale"], 2, "tandem scale: POOL=SIZE must be given"),
        (["keys", "create"], 2, "tandem keys create: --tenant must be given"),
        (["set-role", "decode-0", "prefill"], 2, "unexpected argument 'prefill'"),
        (["status", "--url"], 2, "--url requires an argument"),
        (["status", "--url", "localhost:8002"], 1, "must begin with http://"),
        (["simulate"], 2, "TRACE"),
        (["simulate", "a", "b"], 2, "unexpected argument 'b'"),
        (["scale", "foo"], 1, "foo"),
        (["scale", "prefill=1", "--deadline", "soon"], 2, "soon"),
        (["status", "--bogus", "x"], 2, "--bogus"),
        (["up", "--port", "x"], 2, "--port"),
        (["router", "--model", "m", "--port", "x"], 2, "--port"),
    ],
)
def test_a_wrong_command_line_is_one_line(arguments: list[str], status: int, names: str) -> None:
    done = tandem(*arguments)
    assert done.returncode == status
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert names in done.stderr


def test_a_program_gets_its_arguments_untouched() -> None:
    # An empty argument, which a shell or a chart may pass, stays an argument.
    done = tandem("worker", "--generation", "", "--model", "m", "--role", "none")
    assert "--role" in done.stderr
    done = tandem("worker", "--help")
    assert done.returncode == 0
    assert "Usage: tandem worker" in done.stdout
    assert "--kv-memory" in done.stdout


def test_the_package_is_a_program_and_has_a_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tandem", "--version"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"tandem {version('tandem-llm')}\n"
    assert tandem_package.__version__ == version("tandem-llm")


def test_a_key_may_be_limited_to_models(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    for models in ("a,b/c", ""):
        tandem("keys", "create", "--tenant", "t", "--file", str(file), "--models", models)
    records = json.loads(file.read_text())
    assert [each.get("limits", {}).get("models") for each in records] == [["a", "b/c"], None]


def test_a_wrong_option_of_a_further_model_is_one_line() -> None:
    done = tandem("up", "a", "--model", "b port=1")
    assert done.returncode == 2
    assert "b has the option 'port'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["up", "serve"])
def test_the_model_may_follow_the_command(command: str) -> None:
    done = tandem(command, "/nowhere/model", "--prefill", "0")
    assert done.returncode == 1
    assert "/nowhere/model" in done.stderr
    done = tandem("pull", "/nowhere/model")
    assert "/nowhere/model" in done.stderr


@pytest.mark.parametrize("command", ["set-role", "flip"])
def test_the_old_name_of_set_role_works(command: str) -> None:
    done = tandem(command, "--help")
    assert done.returncode == 0
    assert "Switch a running worker to the other pool" in done.stdout


def test_version_is_the_distributions() -> None:
    assert tandem("--version").stdout == f"tandem {version('tandem-llm')}\n"


def test_commands_are_listed_in_the_order_of_need() -> None:
    expected = (
        "up serve chat pull join ps status why logs events usage audit scale set-role drain "
        "reset-prefix-cache keys index doctor config kv-size simulate bench completion router "
        "worker controller redis-front --help --version"
    )
    lines = [line.strip("│ ").split() for line in tandem("--help").stdout.splitlines()]
    listed = [words[0] for words in lines if words and words[0] in expected.split()]
    assert " ".join(listed) == expected


@pytest.mark.parametrize(
    "arguments", [["--help"], ["up", "--help"], ["ps"], ["config", "show"], ["pull", "/nowhere"]]
)
def test_no_color_is_respected_on_a_terminal(arguments: list[str]) -> None:
    ours, theirs = pty.openpty()
    environment = {"XDG_STATE_HOME": "/nonexistent", "NO_COLOR": "1", "TERM": "xterm-256color"}
    with subprocess.Popen(
        [sys.executable, "-m", "tandem.ops.cli", *arguments],
        env={**os.environ, **environment},
        stdout=theirs,
        stderr=theirs,
        stdin=theirs,
    ):
        os.close(theirs)
        written = b""
        with suppress(OSError):  # the other side was closed
            while read := os.read(ours, 4096):
                written += read
    os.close(ours)
    assert written
    codes = re.findall(rb"\x1b\[([0-9;]*)m", written)
    # 1 is bold, 2 dim, 3 italic, 0 the end of these; colours begin at 30
    assert {number for code in codes for number in code.split(b";")} <= {b"0", b"1", b"2", b"3"}
    assert b"\x1b" not in tandem(*arguments).stdout.encode(), "the output is no terminal"

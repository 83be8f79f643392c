"""Shell completion: the scripts of the command, and what bash offers with them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPLETION = [sys.executable, "-m", "tandem.ops.completion"]


def run(command: list[str], home: Path) -> str:
    environment = {**os.environ, "HOME": str(home), "SHELL": "/bin/bash"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    path = folder / "tandem.bash"
    path.write_text(run([*COMPLETION, "bash"], folder))
    return path


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("tandem st", {"status"}),
        ("tandem serve --kv-mem", {"--kv-memory"}),
        ("tandem up --served", {"--served-model-name"}),
        ("tandem join --ca", {"--ca-sha256"}),
        ("tandem router --lookup", {"--lookup-deadline"}),
        ("tandem up --kv-dtype fp", {"fp8_e4m3"}),
        ("tandem keys ro", {"rotate"}),
    ],
)
def test_bash_completes_commands_options_and_choices(
    line: str, offered: set[str], script: Path
) -> None:
    words = " ".join(f"'{word}'" for word in line.split())
    program = (
        f"source {script}; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); "
        f"COMP_LINE='{line}'; COMP_POINT=${{#COMP_LINE}}; _tandem; echo \"${{COMPREPLY[@]}}\""
    )
    assert set(run(["bash", "-c", program], script.parent).split()) == offered


@pytest.mark.parametrize(
    ("shell", "path"),
    [
        ("bash", ".local/share/bash-completion/completions/tandem"),
        ("fish", ".config/fish/completions/tandem.fish"),
    ],
)
def test_a_script_is_installed_for_the_user(shell: str, path: str, tmp_path: Path) -> None:
    said = run([*COMPLETION, shell, "--install"], tmp_path)
    assert said == f"the completion script is in {tmp_path / path}; a new {shell} session uses it\n"
    assert "--kv-memory" in (tmp_path / path).read_text()

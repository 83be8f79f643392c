"""A program that is interrupted, also while it is still loading, ends without a traceback."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

_PAUSES = "import signal\nprint('there', flush=True)\nsignal.pause()\n"


def with_path(folder: Path) -> dict[str, str]:
    """Returns this environment, where modules are looked for in the folder first."""
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("cyclopts", ["tandem.ops.cli", "status"]),
        ("slow_program", ["tandem.common.process.early_end", "slow_program", "--option"]),
    ],
)
def test_ctrl_c_while_a_program_loads_shows_nothing(
    tmp_path: Path, module: str, command: list[str]
) -> None:
    (tmp_path / f"{module}.py").write_text(_PAUSES)
    with subprocess.Popen(
        [sys.executable, "-m", *command],
        env=with_path(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, b"\n")


def test_a_program_gets_its_arguments_and_its_status_counts(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys\nsys.exit(' '.join(sys.argv[1:]))\n")
    done = subprocess.run(
        [sys.executable, "-m", "tandem.common.process.early_end", "program", "a", "--b"],
        env={
            **os.environ,
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (1, "a --b\n")

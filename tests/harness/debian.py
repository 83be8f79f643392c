"""Files from Debian packages, downloaded by apt without root and unpacked into the cache."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

_CACHE = Path(os.environ.get("TANDEM_CACHE_DIR", Path.home() / ".cache" / "tandem"))
_FETCH_DEADLINE_S = 60.0


def unpacked(package: str, path: str) -> Path:
    """Path of a file in a package. Skips the test if the package cannot be downloaded."""
    folder = _CACHE / package
    if not (folder / path).exists() and (failure := _why_not(package)):
        pytest.skip(f"no {path} here, and apt does not bring Debian's {package}: {failure}")
    return folder / path


@cache
def _why_not(package: str) -> str:
    """Downloads the package, once per session. Returns an empty text, or why it failed."""
    try:
        _fetch(package, _CACHE / package)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        return str(said).strip()[-300:]
    return ""


def _fetch(name: str, folder: Path) -> None:
    """Downloads and unpacks a package. Needs apt and dpkg but no root: package lists are stored in
    our own folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    own = [f"Dir::State::Lists={folder / 'lists'}", f"Dir::Cache={folder}", "Acquire::Retries=0"]
    ways: list[list[str]] = [[], [word for option in own for word in ("-o", option)]]
    for options in ways:
        try:
            if options:
                _run(["apt-get", *options, "-qq", "update"], folder)
            _run(["apt-get", *options, "-qq", "download", name], folder)
            break
        except subprocess.CalledProcessError:
            if options == ways[-1]:
                raise
    (package,) = folder.glob(f"{name}_*.deb")
    _run(["dpkg", "-x", str(package), str(folder)], folder)
    package.unlink()


def _run(command: Sequence[str], folder: Path) -> None:
    subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True, timeout=_FETCH_DEADLINE_S
    )

"""Paths of Unix sockets fit into what Linux allows, wherever TMPDIR is."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path

import pytest

from tandem.errors import ConfigError
from tandem.net import socket_folder
from tandem.net.socket_folder import make_socket_folder


@pytest.mark.parametrize("length", [20, 28, 60, 75, 76, 107, 250])
@pytest.mark.parametrize("letter", ["d", "ü"])
def test_a_socket_can_be_bound_below_it(
    length: int, letter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Path(tempfile.mkdtemp(dir="/tmp"))
    deep = base / (letter * max(1, (length - len(str(base)) - 1) // len(letter.encode())))
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = make_socket_folder()
    try:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder.parent == deep) == (len(os.fsencode(deep)) <= 75)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "plasma_store"))
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(base)


def test_without_a_short_folder_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("deep-" * 20)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    monkeypatch.setattr(socket_folder, "_SHORT", tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"TMPDIR is .*No such file.*at most 75 bytes"):
        make_socket_folder()

"""The host in a worker's record: the fullest disk that it writes to."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem.net.observability.log_file import FILE_VARIABLE
from tandem.worker.lifecycle import host_state


def test_the_fullest_disk_counts_and_a_folder_that_is_not_there_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disks = {tmp_path / "log": (10, 100), tmp_path / "copies": (2, 50)}

    def statvfs(folder: Path) -> SimpleNamespace:
        if folder not in disks:
            raise FileNotFoundError(folder)
        free, total = disks[folder]
        return SimpleNamespace(f_bavail=free, f_blocks=total, f_frsize=4096)

    monkeypatch.setattr(host_state.os, "statvfs", statvfs)
    found = host_state.fullest_disk([*disks, tmp_path / "nowhere"])
    assert found == (2 * 4096, 50 * 4096)
    assert host_state.fullest_disk([tmp_path / "nowhere"]) == (0, 0)


def test_a_worker_writes_to_its_log_and_its_copies_of_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(FILE_VARIABLE, raising=False)
    assert host_state.written_folders() == []
    monkeypatch.setenv(FILE_VARIABLE, "/logs/decode-0.log")
    folders = Path("/copies"), Path("/more")
    assert host_state.written_folders(*folders) == [Path("/logs"), *folders]

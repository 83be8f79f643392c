"""Workers that start together on a machine find the folders of the workers before them, and take
none that another user prepared."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.tiers.disk.folder import claim
from tandem.engine.tiers.disk.storage import DiskStorage
from tandem.engine.tiers.seal import make_seal
from tandem.errors import ConfigError

OPTION = "kv-disk-path"


def test_workers_that_start_together_take_the_folders_that_are_there(tmp_path: Path) -> None:
    """One looks into all free folders while the other one starts: it locks them for that."""
    before = [claim(tmp_path, lambda path: False, OPTION) for _ in range(2)]
    for folder in before:
        folder.close()
    looks, has_other = threading.Event(), threading.Event()

    def is_own(path: Path) -> bool:
        looks.set()
        has_other.wait(0.3)  # the other one waits in turn
        return True

    with ThreadPoolExecutor(1) as threads:
        one = threads.submit(claim, tmp_path, is_own, OPTION)
        assert looks.wait(60)
        two = claim(tmp_path, lambda path: True, OPTION)
        has_other.set()
        assert [one.result().path.name, two.path.name] == ["0", "1"]
    one.result().close()
    two.close()


def storage(path: Path) -> DiskStorage:
    seal = make_seal("", "m")
    return DiskStorage(path, bytes_max=1 << 20, block_bytes=4096, identity="m", seal=seal)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    file = tmp_path / "victim"
    file.write_text("precious")
    return file


@pytest.mark.parametrize("name", ["blocks", "manifest", "lock"])
@pytest.mark.parametrize("prepare", [Path.symlink_to, Path.hardlink_to])
def test_a_prepared_link_is_not_followed(
    tmp_path: Path, victim: Path, name: str, prepare: Callable[[Path, Path], None]
) -> None:
    folder = tmp_path / "kv" / "0"
    folder.mkdir(parents=True)
    prepare(folder / name, victim)
    with pytest.raises(ConfigError, match=f"kv-disk-path .*{name}"):
        storage(tmp_path / "kv")
    assert victim.read_text() == "precious"


def test_other_kinds_of_prepared_files_are_refused(tmp_path: Path, victim: Path) -> None:
    """The lock of all folders, the folder itself, a pipe, and files that everybody may write."""
    prepared: list[Callable[[Path], object]] = [
        lambda kv: (kv / "lock").symlink_to(victim),
        lambda kv: (kv / "0").symlink_to(tmp_path),
        lambda kv: ((kv / "0").mkdir(), os.mkfifo(kv / "0" / "manifest")),
        lambda kv: ((kv / "0").mkdir(), (kv / "0").chmod(0o777)),
        lambda kv: ((kv / "0").mkdir(), os.mknod(kv / "0/blocks"), (kv / "0/blocks").chmod(0o666)),
    ]
    for number, prepare in enumerate(prepared):
        kv = tmp_path / f"kv{number}"
        kv.mkdir()
        prepare(kv)
        with pytest.raises(ConfigError, match=f"kv-disk-path {kv}"):
            storage(kv)
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("part", ["kv", "kv/0", "kv/0/blocks", "kv/lock"])
def test_what_belongs_to_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """The user of the process is another one from the moment that the part is opened."""
    kv = tmp_path / "kv"
    storage(kv).close()
    user, opened = os.geteuid(), os.open
    other = user + 1

    def open_as_other(name: Any, *arguments: Any, **more: Any) -> int:
        if Path(name).name == Path(part).name:
            monkeypatch.setattr(os, "geteuid", lambda: other)
        return opened(name, *arguments, **more)

    if user == 0 and part == "kv":
        os.chown(kv, 65534, 65534)  # root's own folder may be shared
    else:
        monkeypatch.setattr(os, "open", open_as_other)
    with pytest.raises(ConfigError, match=rf"kv-disk-path .*{part} belongs to user"):
        storage(kv)


def test_what_a_group_may_do_is_taken_away(tmp_path: Path) -> None:
    """Kubernetes gives a volume's files to the pod's group."""
    storage(tmp_path / "kv").close()
    folder = tmp_path / "kv" / "0"
    folder.chmod(0o2770)
    (folder / "blocks").chmod(0o664)
    storage(tmp_path / "kv").close()
    assert [stat.S_IMODE(p.stat().st_mode) & 0o777 for p in (folder, folder / "blocks")] == [
        0o700,
        0o600,
    ]

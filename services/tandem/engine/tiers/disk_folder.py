"""A worker's own folder below --kv-disk-path, which no other process uses at the same time.

    PATH/lock
    PATH/0/{lock,manifest,blocks}  PATH/1/...        of a model's second KV group: manifest-1, ...

All workers of a machine get the same path. Each takes the first folder that is free and was written
for its model, so that a worker that starts again finds blocks of the one before it; else one that
was written for another model; else a new one. A lock of the system (flock) says whether a folder is
free: it ends with the process, however that ends. Workers choose one after the other, because each
locks all free folders to look into them.
"""

import fcntl
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path

from tandem.errors import ConfigError


class DiskFolder:
    """A folder that this process has locked until `close`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    def open(self, name: str) -> int:
        """Returns a file of the folder, which is made if it is not there. Raises OSError."""
        return os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def drop(self, *patterns: str) -> None:
        """Removes files of the folder. Raises OSError."""
        for pattern in patterns:
            for path in self.path.glob(pattern):
                path.unlink()

    def again(self) -> "DiskFolder":
        """Returns the same folder for a further user; it is locked until all have closed it."""
        return DiskFolder(self.path, os.dup(self._lock))

    def close(self) -> None:
        os.close(self._lock)


def claim(parent: Path, is_own: Callable[[Path], bool]) -> DiskFolder:
    """Locks a folder, one that `is_own` if there is one. Raises ConfigError."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        turn = _open_lock(parent)
        try:
            fcntl.flock(turn, fcntl.LOCK_EX)
            return _choose(parent, is_own)
        finally:
            os.close(turn)
    except OSError as error:
        raise ConfigError(f"kv-disk-path {parent}: {error}") from error


def _choose(parent: Path, is_own: Callable[[Path], bool]) -> DiskFolder:
    there = sorted((int(p.name), p) for p in parent.iterdir() if p.name.isdecimal())
    locked = [folder for _, path in there if (folder := _lock(path)) is not None]
    chosen = next((folder for folder in locked if is_own(folder.path)), None)
    chosen = chosen or (locked[0] if locked else None)
    for folder in locked:
        if folder is not chosen:
            folder.close()
    names = count(max((number for number, _ in there), default=-1) + 1)
    while chosen is None:
        chosen = _lock(parent / str(next(names)))
    return chosen


def _lock(path: Path) -> DiskFolder | None:
    """Returns the folder; None if another process has it. Raises OSError."""
    path.mkdir(mode=0o700, exist_ok=True)
    lock = _open_lock(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return DiskFolder(path, lock)


def _open_lock(folder: Path) -> int:
    return os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

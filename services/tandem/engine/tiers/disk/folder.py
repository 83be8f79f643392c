"""A worker's own folder below --kv-disk-path, which no other process uses at the same time.

    PATH/lock
    PATH/0/{lock,manifest,blocks}  PATH/1/...        of a model's second KV group: manifest-1, ...

All workers of a machine get the same path. Each takes the first folder that is free and was written
for its model, so that a worker that starts again finds blocks of the one before it; else one that
was written for another model; else a new one. A lock of the system (flock) says whether a folder is
free: it ends with the process, however that ends. Workers choose one after the other, because each
locks all free folders to look into them. What another user may have prepared is refused
(own_files.py).
"""

import fcntl
import os
from collections.abc import Callable
from contextlib import ExitStack
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path

from tandem.common.process import own_files
from tandem.errors import ConfigError


class DiskFolder:
    """A folder that this process has locked until `close`."""

    def __init__(self, path: Path, folder: int, lock: int) -> None:
        self.path = path
        self._folder = folder
        self._lock = lock

    def open(self, name: str) -> int:
        """Returns a file of the folder, which is made if it is not there. Raises OSError."""
        return own_files.open_file(self.path / name, dir_fd=self._folder)

    def drop(self, *patterns: str) -> None:
        """Removes files of the folder. Raises OSError."""
        for name in os.listdir(self._folder):
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                os.unlink(name, dir_fd=self._folder)

    def again(self) -> "DiskFolder":
        """Returns the same folder for a further user; it is locked until all have closed it."""
        return DiskFolder(self.path, os.dup(self._folder), os.dup(self._lock))

    def close(self) -> None:
        os.close(self._lock)
        os.close(self._folder)


def claim(parent: Path, is_own: Callable[[Path], bool]) -> DiskFolder:
    """Locks a folder, one that `is_own` if there is one. Raises ConfigError."""
    try:
        with ExitStack() as opened:
            shared = own_files.open_parent(parent)
            opened.callback(os.close, shared)
            turn = own_files.open_file(parent / "lock", dir_fd=shared)
            opened.callback(os.close, turn)
            fcntl.flock(turn, fcntl.LOCK_EX)
            return _choose(parent, shared, is_own)
    except OSError as error:
        raise ConfigError(f"kv-disk-path {parent}: {error}") from error


def _choose(parent: Path, shared: int, is_own: Callable[[Path], bool]) -> DiskFolder:
    there = sorted((int(name), parent / name) for name in os.listdir(shared) if name.isdecimal())
    locked = [folder for _, path in there if (folder := _lock(path, shared)) is not None]
    chosen = next((folder for folder in locked if is_own(folder.path)), None)
    chosen = chosen or (locked[0] if locked else None)
    for folder in locked:
        if folder is not chosen:
            folder.close()
    names = count(max((number for number, _ in there), default=-1) + 1)
    while chosen is None:
        chosen = _lock(parent / str(next(names)), shared)
    return chosen


def _lock(path: Path, shared: int) -> DiskFolder | None:
    """Returns the folder; None if another process has it. Raises OSError."""
    with ExitStack() as opened:
        folder = own_files.open_folder(path, dir_fd=shared)
        opened.callback(os.close, folder)
        lock = own_files.open_file(path / "lock", dir_fd=folder)
        opened.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        opened.pop_all()
    return DiskFolder(path, folder, lock)

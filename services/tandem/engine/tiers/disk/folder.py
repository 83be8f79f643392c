"""Claims a folder below a tier's path for a worker. No other process uses it at the same time.

    PATH/lock                        locked while a worker chooses a folder
    PATH/0/lock,manifest,blocks      the folder of one worker
    PATH/0/manifest-1,blocks-1       files of the same worker for a second KV group
    PATH/1/...                       the folder of another worker

All workers of a machine get the same path. A worker takes the first free folder that was written
for its model, so that it finds the blocks of an earlier process. If there is none, it takes a free
folder of another model, or creates one. A file lock (flock) shows whether a folder is free. The
system releases the lock when the process ends, even if it is killed. Workers choose one after the
other, because each locks all free folders to read them. Files that another user could have prepared
are refused (own_files.py).
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
    """A worker's folder, which this process keeps locked until `close`."""

    def __init__(self, path: Path, folder: int, lock: int) -> None:
        self.path = path
        self._folder = folder
        self._lock = lock

    def open(self, name: str) -> int:
        """Opens or creates a file in the folder. Returns the file descriptor. Raises OSError."""
        return own_files.open_file(self.path / name, dir_fd=self._folder)

    def drop(self, *patterns: str) -> None:
        """Removes the files in the folder whose names match one of the patterns. Raises OSError."""
        for name in os.listdir(self._folder):
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                os.unlink(name, dir_fd=self._folder)

    def duplicate(self) -> "DiskFolder":
        """Returns another handle of the folder. The folder stays locked until all handles are
        closed."""
        return DiskFolder(self.path, os.dup(self._folder), os.dup(self._lock))

    def close(self) -> None:
        os.close(self._lock)
        os.close(self._folder)


def claim(parent: Path, is_own: Callable[[Path], bool], option: str) -> DiskFolder:
    """Locks a free folder below `parent` and returns it. Prefers a folder for which `is_own` is
    True, and creates one if none is free. Raises ConfigError, which names the `option` that set
    `parent`."""
    try:
        with ExitStack() as opened:
            shared = own_files.open_parent(parent)
            opened.callback(os.close, shared)
            choosing = own_files.open_file(parent / "lock", dir_fd=shared)
            opened.callback(os.close, choosing)
            fcntl.flock(choosing, fcntl.LOCK_EX)
            return _choose(parent, shared, is_own)
    except OSError as error:
        raise ConfigError(f"{option} {parent} cannot be used: {error}") from error


def _choose(parent: Path, shared: int, is_own: Callable[[Path], bool]) -> DiskFolder:
    existing = sorted((int(name), parent / name) for name in os.listdir(shared) if name.isdecimal())
    locked = [folder for _, path in existing if (folder := _lock(path, shared)) is not None]
    chosen = next((folder for folder in locked if is_own(folder.path)), None)
    chosen = chosen or (locked[0] if locked else None)
    for folder in locked:
        if folder is not chosen:
            folder.close()
    names = count(max((number for number, _ in existing), default=-1) + 1)
    while chosen is None:
        chosen = _lock(parent / str(next(names)), shared)
    return chosen


def _lock(path: Path, shared: int) -> DiskFolder | None:
    """Locks a folder. Returns None if another process has locked it. Raises OSError."""
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

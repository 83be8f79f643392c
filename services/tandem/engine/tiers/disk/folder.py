"""A worker's own folder below --kv-disk-path, which no other process uses at the same time.

    PATH/lock
    PATH/0/{lock,manifest,blocks}  PATH/1/...        (manifest-1, blocks-1 for a second KV group)

All workers of a machine get the same path. Each worker takes the first free folder that was written
for its model, so that it finds the blocks of its predecessor. Otherwise it takes a free folder of
another model, or creates one. A file lock (flock) shows whether a folder is free; the system
releases it when the process ends, however it ends. Workers choose one after the other, because each
locks all free folders to read them. Files that another user could have prepared are refused
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
        """Opens a file of the folder, and creates it if it does not exist. Returns its descriptor.
        Raises OSError."""
        return own_files.open_file(self.path / name, dir_fd=self._folder)

    def drop(self, *patterns: str) -> None:
        """Removes the files of the folder that match one of the patterns. Raises OSError."""
        for name in os.listdir(self._folder):
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                os.unlink(name, dir_fd=self._folder)

    def duplicate(self) -> "DiskFolder":
        """Returns another handle of the folder, which stays locked until all handles are closed."""
        return DiskFolder(self.path, os.dup(self._folder), os.dup(self._lock))

    def close(self) -> None:
        os.close(self._lock)
        os.close(self._folder)


def claim(parent: Path, is_own: Callable[[Path], bool]) -> DiskFolder:
    """Locks a folder, preferably one for which `is_own` is True. Raises ConfigError."""
    try:
        with ExitStack() as opened:
            shared = own_files.open_parent(parent)
            opened.callback(os.close, shared)
            choosing = own_files.open_file(parent / "lock", dir_fd=shared)
            opened.callback(os.close, choosing)
            fcntl.flock(choosing, fcntl.LOCK_EX)
            return _choose(parent, shared, is_own)
    except OSError as error:
        raise ConfigError(f"kv-disk-path {parent}: {error}") from error


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

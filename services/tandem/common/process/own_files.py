"""Opens folders and files safely where other local users may have created links or files.

Another local user who can write next to the folder could create a symbolic link, a hard link or a
folder with the same name before this process starts. So no link is followed, the owner is checked,
and world-writable entries are refused. Group and read permissions are removed instead of refused,
because Kubernetes gives a volume's files to the pod's own group (fsGroup).
"""

import contextlib
import os
import stat
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def open_parent(path: Path) -> int:
    """Opens a folder that others may share, such as a mounted disk. Creates it if necessary.

    Raises OSError if the folder, or a symbolic link at its path, belongs to another user than root
    or this process's user.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for found in (path.lstat(), os.fstat(folder)):
            _check_owner(path, found, (os.geteuid(), 0))
    except OSError:
        os.close(folder)
        raise
    return folder


def make_folder(path: Path) -> None:
    """Creates a folder that only this user may use, or checks the existing folder.

    Raises the errors of `open_folder`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(open_folder(path))


def open_folder(path: Path, *, dir_fd: int | None = None) -> int:
    """Opens a folder that only this user may use. Creates it if necessary. `dir_fd` is the
    descriptor of the parent folder.

    Raises OSError if `path` is a link, or if other users own the folder or may write it.
    """
    name = path if dir_fd is None else path.name
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=dir_fd)
    return _checked(path, os.open(name, _FOLDER, dir_fd=dir_fd), 0o700)


def open_file(path: Path, *, dir_fd: int) -> int:
    """Opens a file for reads and writes that only this user may use. Creates it if necessary.

    `dir_fd` is the descriptor of the file's folder. Raises OSError if `path` is a link or no plain
    file, or if other users own the file or may write it.
    """
    file = os.open(path.name, _FILE, 0o600, dir_fd=dir_fd)
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        os.close(file)
        raise PermissionError(f"{path} must be a regular file with one hard link; remove {path}")
    return _checked(path, file, 0o600)


def _checked(path: Path, opened: int, mode: int) -> int:
    """Returns the descriptor `opened`. If the file or folder may not be used, closes the descriptor
    and raises OSError."""
    try:
        found = os.fstat(opened)
        _check_owner(path, found, (os.geteuid(),))
        if found.st_mode & stat.S_IWOTH:
            raise PermissionError(
                f"every user may write to {path} (mode {stat.S_IMODE(found.st_mode):04o}); remove "
                f"{path}"
            )
        if found.st_mode & 0o077:
            os.fchmod(opened, mode)
    except OSError:
        os.close(opened)
        raise
    return opened


def _check_owner(path: Path, found: os.stat_result, allowed: tuple[int, ...]) -> None:
    if found.st_uid not in allowed:
        raise PermissionError(
            f"{path} belongs to user {found.st_uid}, but this process runs as user {allowed[0]}; "
            f"remove {path}, or choose another folder"
        )
